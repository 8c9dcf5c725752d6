// Attention over one piece of 256 positions (docs/numerics.md, "Attention").
//
// Scores are chains over the head dimension, vectors over 16 keys. Values are chains over positions, vectors over the
// head dimension. Several heads of several rows go side by side: they share the loads and conversions of K and V, and
// hide the latency of the adds. They need not see the same: a slot that a row does not see is scored with those that it
// sees, but its lane is not used, and its value not added (with weight 0 it might still be NaN).
#pragma once

#include "half.hpp"
#include "kernels.hpp"

namespace bitmtp::BITMTP_ISA {

constexpr int kHeads = kNative == 16 ? kMostQueries : 6;

// Vectors side by side for G heads: as many as the registers hold.
template <int G>
constexpr int kVectors = kNative == 16 ? (G <= 6 ? 4 : G <= 8 ? 3 : 2) : G <= 2 ? 2 : 1;

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

// What all of a task's queries see is one list of spans; slots that follow each other are scored together.
struct Strip {
    const Span* spans;
    int count;
};

BITMTP_INLINE bool follows(const Run& run, const Run& next) {
    return next.piece == run.piece && next.slot == run.slot + run.count;
}

inline Strip strip_of(const Span* spans, int count) {
    int end = 1;
    while (end < count && follows(spans[end - 1].run, spans[end].run)) ++end;
    return {spans, end};
}

// The run that holds all of these blocks' slots, if all rows see it.
inline const Run* whole_run(const Strip& strip, int block, int blocks) {
    const Span& span = strip.spans[0];
    const int first = block * kBlockKeys - span.run.slot, last = first + blocks * kBlockKeys;
    return first >= 0 && last <= span.run.count && span.seen == kAllRows ? &span.run : nullptr;
}

// Copy the lanes of one block's scores that the query sees to their positions.
inline void place_scores(const float* lanes, int block, const Strip& strip, int row, float* scores) {
    for (int i = 0; i < strip.count; ++i) {
        const Run& run = strip.spans[i].run;
        const int first = block * kBlockKeys - run.slot;  // of lane 0, counted from the run's start
        const int begin = first < 0 ? -first : 0;
        const int end = run.count - first < kBlockKeys ? run.count - first : kBlockKeys;
        if (begin >= end || !(strip.spans[i].seen >> row & 1)) continue;
        for (int lane = begin; lane < end; ++lane) scores[run.place + first + lane] = lanes[lane];
    }
}

// The vectors of G queries side by side in chunks, so that one address reaches them all.
template <int G>
void pack_queries(const Query* q, int head_dim, float* out) {
    for (int first = 0; first < head_dim; first += kQueryChunk) {
        for (int g = 0; g < G; ++g, out += kQueryChunk) {
            for (int d = first; d < first + kQueryChunk && d < head_dim; d += kLanes) {
                store(out + d - first, load_padded(q[g].vector, d, head_dim));
            }
        }
    }
}

// Keys are read in order, but two blocks at a time and from the start of many pages, which the hardware does not guess:
// each batch of blocks fetches the next one (`ahead`), and its own values for later.
template <class T, int G, int B>
BITMTP_INLINE void score_blocks(const T* keys, int head_dim, const float* q, int block, int ahead, const Strip& strip,
                                const Query* queries, Scores* scores) {
    constexpr int kLine = 64 / (sizeof(T) * kBlockKeys);  // a cache line, in vectors of keys
    f32x16 sums[G * B];
#pragma GCC unroll 32
    for (f32x16& sum : sums) sum = splat(0.0f);
    const T* at = keys + std::ptrdiff_t(block) * head_dim * kBlockKeys;
    const T* values = at + kPiecePositions * head_dim;
    const T* next = keys + std::ptrdiff_t(ahead) * head_dim * kBlockKeys;
    for (int first = 0; first < head_dim; first += kQueryChunk, q += G * kQueryChunk) {
        const int n = head_dim - first < kQueryChunk ? head_dim - first : kQueryChunk;
        for (int d = 0; d < n; ++d, at += kBlockKeys, next += B * kBlockKeys, values += B * kBlockKeys) {
            f32x16 k[B];
#pragma GCC unroll 8
            for (int b = 0; b < B; ++b) {
                k[b] = load(at + std::ptrdiff_t(b) * head_dim * kBlockKeys);
                if (b % kLine) continue;
                __builtin_prefetch(next + b * kBlockKeys);
                __builtin_prefetch(values + b * kBlockKeys);
            }
#pragma GCC unroll 16
            for (int g = 0; g < G; ++g) {
                const f32x16 factor = splat(q[g * kQueryChunk + d]);
#pragma GCC unroll 8
                for (int b = 0; b < B; ++b) sums[g * B + b] = fma(factor, k[b], sums[g * B + b]);
            }
        }
    }
    if (const Run* run = whole_run(strip, block, B)) {
        const int place = run->place + block * kBlockKeys - run->slot;
#pragma GCC unroll 32
        for (int i = 0; i < G * B; ++i) store(scores[i / B].at + place + i % B * kBlockKeys, sums[i]);
        return;
    }
    alignas(64) float lanes[G * B][kLanes];
#pragma GCC unroll 32
    for (int i = 0; i < G * B; ++i) store(lanes[i], sums[i]);
    for (int i = 0; i < G * B; ++i) place_scores(lanes[i], block + i % B, strip, queries[i / B].row, scores[i / B].at);
}

template <class T, int G>
void score_strip(const HeadLayout& layout, const Strip& strip, const float* q, const Query* queries, Scores* scores) {
    constexpr int B = kVectors<G>;
    const Run &first = strip.spans[0].run, &last = strip.spans[strip.count - 1].run;
    const T* keys = reinterpret_cast<const T*>(first.piece + layout.keys);
    const int end = (last.slot + last.count - 1) / kBlockKeys + 1;
    int block = first.slot / kBlockKeys;
    for (; block + B <= end; block += B) {
        const int ahead = block + B < end ? block + B : block;
        score_blocks<T, G, B>(keys, layout.head_dim, q, block, ahead, strip, queries, scores);
    }
    for (; block < end; ++block) {
        score_blocks<T, G, 1>(keys, layout.head_dim, q, block, block, strip, queries, scores);
    }
}

// Scores to weights e, in place; fills in the maximum and the sum. N queries with one range go side by side, which
// hides the latency of the chains.
template <int N>
BITMTP_INLINE void soften(Scores* scores, const Query* q) {
    const int begin = q[0].begin, end = q[0].end;
    f32x16 largest[N], m[N], sums[N];
#pragma GCC unroll 4
    for (int g = 0; g < N; ++g) largest[g] = load(scores[g].at + begin);
    for (int i = begin + kLanes; i < end; i += kLanes) {
#pragma GCC unroll 4
        for (int g = 0; g < N; ++g) largest[g] = max(largest[g], load(scores[g].at + i));
    }
#pragma GCC unroll 4
    for (int g = 0; g < N; ++g) {
        q[g].out->m = fold_max(largest[g]);
        m[g] = splat(q[g].out->m);
        sums[g] = splat(0.0f);  // adding the first weights to it changes nothing: none of them is -0
    }
    for (int i = begin; i < end; i += kLanes) {
#pragma GCC unroll 4
        for (int g = 0; g < N; ++g) {
            const f32x16 e = exp(load(scores[g].at + i) - m[g]);
            store(scores[g].at + i, e);
            sums[g] = sums[g] + e;
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < N; ++g) q[g].out->l = fold(sums[g]);
}

BITMTP_INLINE bool same_range(const Query& a, const Query& b) { return a.begin == b.begin && a.end == b.end; }

template <class T, int G, int V>
BITMTP_INLINE void weigh(const HeadLayout& layout, const Span* spans, int count, int d, const Scores* e,
                         const Query* q) {
    f32x16 sums[G * V];
#pragma GCC unroll 32
    for (f32x16& sum : sums) sum = splat(0.0f);
    for (int r = 0; r < count; ++r) {
        const Run& run = spans[r].run;
        const T* values = reinterpret_cast<const T*>(run.piece + layout.values) + d;
        values += std::ptrdiff_t(run.slot) * layout.padded_dim;
        const auto add = [&](int i, auto&& sees) {
            f32x16 v[V];
#pragma GCC unroll 8
            for (int j = 0; j < V; ++j) v[j] = load(values + j * kLanes);
#pragma GCC unroll 16
            for (int g = 0; g < G; ++g) {
                if (!sees(g)) continue;
                const f32x16 weight = splat(e[g].at[run.place + i]);
#pragma GCC unroll 8
                for (int j = 0; j < V; ++j) sums[g * V + j] = fma(weight, v[j], sums[g * V + j]);
            }
            values += layout.padded_dim;
        };
        bool all = true;
        for (int g = 0; g < G; ++g) all = all && spans[r].seen >> q[g].row & 1;
        if (all) {
            for (int i = 0; i < run.count; ++i) add(i, [](int) { return true; });
        } else {
            for (int i = 0; i < run.count; ++i) add(i, [&](int g) { return spans[r].seen >> q[g].row & 1; });
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < G * V; ++i) store(q[i / V].out->o + d + i % V * kLanes, sums[i]);
}

template <class T, int G>
void attend_heads(const HeadLayout& layout, const Span* spans, int count, const Query* q, float* scratch) {
    constexpr int V = kVectors<G>;
    Scores scores[G];
    for (int g = 0; g < G; ++g) {
        for (int i = q[g].begin; i < q[g].end; i += kLanes) store(scores[g].at + i, splat(-__builtin_inff()));
    }
    pack_queries<G>(q, layout.head_dim, scratch);
    for (int at = 0; at < count;) {
        const Strip strip = strip_of(spans + at, count - at);
        score_strip<T, G>(layout, strip, scratch, q, scores);
        at += strip.count;
    }
    for (int g = 0; g < G;) {
        const int size = g + 1 < G && same_range(q[g], q[g + 1]) ? 2 : 1;
        size == 2 ? soften<2>(scores + g, q + g) : soften<1>(scores + g, q + g);
        g += size;
    }
    int d = 0;
    for (; d + V * kLanes <= layout.padded_dim; d += V * kLanes) weigh<T, G, V>(layout, spans, count, d, scores, q);
    for (; d < layout.padded_dim; d += kLanes) weigh<T, G, 1>(layout, spans, count, d, scores, q);
}

template <class T, int G = kHeads>
void attend_group(const HeadLayout& layout, const Span* spans, int count, const Query* q, int size, float* scratch) {
    if constexpr (G > 1) {
        if (size < G) return attend_group<T, G - 1>(layout, spans, count, q, size, scratch);
    }
    attend_heads<T, G>(layout, spans, count, q, scratch);
}

template <class T>
void attend_all(const HeadLayout& layout, const Span* spans, int count, const Query* q, int heads, float* scratch) {
    for (int parts = (heads + kHeads - 1) / kHeads; parts > 0; --parts) {
        const int size = (heads + parts - 1) / parts;
        attend_group<T>(layout, spans, count, q, size, scratch);
        q += size;
        heads -= size;
    }
}

void attend(const HeadLayout& layout, const Span* spans, int count, const Query* q, int heads, float* scratch) {
    if (layout.half) attend_all<std::uint16_t>(layout, spans, count, q, heads, scratch);
    else attend_all<float>(layout, spans, count, q, heads, scratch);
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
