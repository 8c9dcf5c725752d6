// Attention over one piece of 256 positions (docs/numerics.md, "Attention").
//
// Scores are chains over the head dimension, vectors over 16 keys. Values are chains over positions, vectors over the
// head dimension. Up to six heads (of one row, or of rows that see the same) go side by side: they share the loads and
// conversions of K and V, and hide the latency of the adds. A slot that a row does not see may lie in a vector beside
// ones that it sees, but its lane is never used.
#pragma once

#include "half.hpp"
#include "kernels.hpp"

namespace bitmtp::BITMTP_ISA {

constexpr int kHeads = 6;

// Vectors side by side for G heads: as many as the registers hold.
template <int G>
constexpr int kVectors = kNative == 16 ? 4 : G <= 2 ? 2 : 1;

struct alignas(64) Scores {
    float at[kPiecePositions];
};

template <class T>
void store_column(T* keys, const HeadLayout& layout, int slot, const float* k) {
    keys += std::ptrdiff_t(slot / kBlockKeys) * layout.head_dim * kBlockKeys + slot % kBlockKeys;
    for (int d = 0; d < layout.head_dim; d += kLanes) {
        T lanes[kLanes];
        store(lanes, load_padded(k, d, layout.head_dim));
        for (int i = 0; i < kLanes && d + i < layout.head_dim; ++i) keys[(d + i) * kBlockKeys] = lanes[i];
    }
}

void store_key(std::uint8_t* piece, const HeadLayout& layout, int slot, const float* k) {
    piece += layout.keys;
    if (layout.half) store_column(reinterpret_cast<std::uint16_t*>(piece), layout, slot, k);
    else store_column(reinterpret_cast<float*>(piece), layout, slot, k);
}

template <class T>
void store_row(T* values, const HeadLayout& layout, int slot, const float* v) {
    values += std::ptrdiff_t(slot) * layout.padded_dim;
    for (int d = 0; d < layout.head_dim; d += kLanes) store(values + d, load_padded(v, d, layout.head_dim));
}

void store_value(std::uint8_t* piece, const HeadLayout& layout, int slot, const float* v) {
    piece += layout.values;
    if (layout.half) store_row(reinterpret_cast<std::uint16_t*>(piece), layout, slot, v);
    else store_row(reinterpret_cast<float*>(piece), layout, slot, v);
}

// Copy the run's lanes of one block's scores to their positions.
inline void place_scores(const float* lanes, int block, const Run& run, float* scores) {
    const int first = block * kBlockKeys - run.slot;  // of lane 0, counted from the run's start
    const int begin = first < 0 ? -first : 0;
    const int end = run.count - first < kBlockKeys ? run.count - first : kBlockKeys;
    if (begin == 0 && end == kBlockKeys) return store(scores + run.place + first, load(lanes));
    for (int i = begin; i < end; ++i) scores[run.place + first + i] = lanes[i];
}

template <class T, int G, int B>
BITMTP_INLINE void score_blocks(const T* keys, int head_dim, const Query* q, int block, const Run& run,
                                Scores* scores) {
    f32x16 sums[G * B];
#pragma GCC unroll 32
    for (f32x16& sum : sums) sum = splat(0.0f);
    const T* at = keys + std::ptrdiff_t(block) * head_dim * kBlockKeys;
    for (int d = 0; d < head_dim; ++d) {
        f32x16 k[B];
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b) {
            const T* from = at + (std::ptrdiff_t(b) * head_dim + d) * kBlockKeys;
            k[b] = load(from);
            __builtin_prefetch(from + kPiecePositions * head_dim);  // these keys' values are as far behind them
        }
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) {
            const f32x16 factor = splat(q[g].vector[d]);
#pragma GCC unroll 8
            for (int b = 0; b < B; ++b) sums[g * B + b] = fma(factor, k[b], sums[g * B + b]);
        }
    }
    alignas(64) float lanes[G * B][kLanes];
#pragma GCC unroll 32
    for (int i = 0; i < G * B; ++i) store(lanes[i], sums[i]);
    for (int i = 0; i < G * B; ++i) place_scores(lanes[i], block + i % B, run, scores[i / B].at);
}

template <class T, int G>
void score_run(const HeadLayout& layout, const Run& run, const Query* q, Scores* scores) {
    constexpr int B = kVectors<G>;
    const T* keys = reinterpret_cast<const T*>(run.piece + layout.keys);
    const int end = (run.slot + run.count - 1) / kBlockKeys + 1;
    int block = run.slot / kBlockKeys;
    for (; block + B <= end; block += B) score_blocks<T, G, B>(keys, layout.head_dim, q, block, run, scores);
    for (; block < end; ++block) score_blocks<T, G, 1>(keys, layout.head_dim, q, block, run, scores);
}

// The vectors of positions [begin, end) that hold whatever is visible; all others would add zeros.
struct Range {
    int begin, end;
};

BITMTP_INLINE Range visible_range(const Run* runs, int count) {
    const Run& last = runs[count - 1];
    return {runs[0].place / kLanes * kLanes, round_up(last.place + last.count, kLanes)};
}

// Scores to weights e, in place; fills in the maximum and the sum.
BITMTP_INLINE void soften(Scores& scores, Range range, Partial& out) {
    f32x16 largest = load(scores.at + range.begin);
    for (int i = range.begin + kLanes; i < range.end; i += kLanes) largest = max(largest, load(scores.at + i));
    out.m = fold_max(largest);
    const f32x16 m = splat(out.m);
    out.l = lane_sum(range.end - range.begin, [&](int i) {
        const f32x16 e = exp(load(scores.at + range.begin + i) - m);
        store(scores.at + range.begin + i, e);
        return e;
    });
}

template <class T, int G, int V>
BITMTP_INLINE void weigh(const HeadLayout& layout, const Run* runs, int count, int d, const Scores* e, const Query* q) {
    f32x16 sums[G * V];
#pragma GCC unroll 32
    for (f32x16& sum : sums) sum = splat(0.0f);
    for (int r = 0; r < count; ++r) {
        const Run& run = runs[r];
        const T* values = reinterpret_cast<const T*>(run.piece + layout.values) + d;
        values += std::ptrdiff_t(run.slot) * layout.padded_dim;
        for (int i = 0; i < run.count; ++i, values += layout.padded_dim) {
            f32x16 v[V];
#pragma GCC unroll 8
            for (int j = 0; j < V; ++j) v[j] = load(values + j * kLanes);
#pragma GCC unroll 8
            for (int g = 0; g < G; ++g) {
                const f32x16 weight = splat(e[g].at[run.place + i]);
#pragma GCC unroll 8
                for (int j = 0; j < V; ++j) sums[g * V + j] = fma(weight, v[j], sums[g * V + j]);
            }
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < G * V; ++i) store(q[i / V].out->o + d + i % V * kLanes, sums[i]);
}

template <class T, int G>
void attend_heads(const HeadLayout& layout, const Run* runs, int count, const Query* q) {
    constexpr int V = kVectors<G>;
    Scores scores[G];
    const Range range = visible_range(runs, count);
    for (auto& head : scores)
        for (int i = range.begin; i < range.end; i += kLanes) store(head.at + i, splat(-__builtin_inff()));
    for (int r = 0; r < count; ++r) score_run<T, G>(layout, runs[r], q, scores);
    for (int g = 0; g < G; ++g) soften(scores[g], range, *q[g].out);
    int d = 0;
    for (; d + V * kLanes <= layout.padded_dim; d += V * kLanes) weigh<T, G, V>(layout, runs, count, d, scores, q);
    for (; d < layout.padded_dim; d += kLanes) weigh<T, G, 1>(layout, runs, count, d, scores, q);
}

template <class T>
void attend_all(const HeadLayout& layout, const Run* runs, int count, const Query* q, int heads) {
    for (int parts = (heads + kHeads - 1) / kHeads; parts > 0; --parts) {
        const int size = (heads + parts - 1) / parts;
        switch (size) {
            case 1: attend_heads<T, 1>(layout, runs, count, q); break;
            case 2: attend_heads<T, 2>(layout, runs, count, q); break;
            case 3: attend_heads<T, 3>(layout, runs, count, q); break;
            case 4: attend_heads<T, 4>(layout, runs, count, q); break;
            case 5: attend_heads<T, 5>(layout, runs, count, q); break;
            default: attend_heads<T, kHeads>(layout, runs, count, q);
        }
        q += size;
        heads -= size;
    }
}

void attend(const HeadLayout& layout, const Run* runs, int count, const Query* q, int heads) {
    if (layout.half) attend_all<std::uint16_t>(layout, runs, count, q, heads);
    else attend_all<float>(layout, runs, count, q, heads);
}

void merge(Partial& into, const Partial& next, int padded_dim) {
    const float m = into.m > next.m ? into.m : next.m;
    const float a = exp(into.m - m), b = exp(next.m - m);
    into.l = into.l * a + next.l * b;
    into.m = m;
    for (int d = 0; d < padded_dim; d += kLanes) {
        store(into.o + d, load(into.o + d) * splat(a) + load(next.o + d) * splat(b));
    }
}

void divide(const Partial& whole, int head_dim, float* out) {
    for (int d = 0; d < head_dim; d += kLanes) {
        const f32x16 y = load(whole.o + d) / splat(whole.l);
        if (d + kLanes <= head_dim) store(out + d, y);
        else store_head(out + d, y, head_dim - d);
    }
}

}  // namespace bitmtp::BITMTP_ISA
