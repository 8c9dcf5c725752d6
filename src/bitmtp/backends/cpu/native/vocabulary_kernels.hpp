// Kernels over a row of the vocabulary: maxima, blocked sums, and the pieces of choosing (docs/sampling.md).
#pragma once

#include "half.hpp"
#include "kernels.hpp"

namespace bitmtp::BITMTP_ISA {

float maximum(const float* x, int n) {
    f32x16 largest = load(x);
    for (int i = kLanes; i < n; i += kLanes) largest = max(largest, load(x + i));
    return fold_max(largest);
}

void chunk_max(const float* x, int n, float* out) {
    for (int i = 0; i < n; i += kChunk) *out++ = maximum(x + i, n - i < kChunk ? n - i : kChunk);
}

int collect(const float* x, int n, float threshold, std::int32_t* indices) {
    int count = 0;
    for (int i = 0; i < n; i += kLanes) {
        if (maximum(x + i, kLanes) < threshold) continue;
        for (int lane = 0; lane < kLanes; ++lane) {
            if (x[i + lane] >= threshold) indices[count++] = i + lane;
        }
    }
    return count;
}

void exp_sums(const float* x, int n, float max, float* sum, float* weighted) {
    const f32x16 m = splat(max);
    const f32x16 first = load(x) - m;
    f32x16 total = exp(first), moment = total * first;
    for (int i = kLanes; i < n; i += kLanes) {
        const f32x16 below = load(x + i) - m, e = exp(below);
        total = total + e;
        moment = moment + e * below;
    }
    *sum = fold(total);
    *weighted = fold(moment);
}

// Lanes of x that stand at the cut or before it in the order of choosing; 0 elsewhere.
BITMTP_INLINE f32x16 keep(f32x16 z, u32x16 ids, Cut cut, f32x16 x) {
    return each<NativeF>([&](int i) {
        const NativeF at = cut.value - NativeF{};
        const NativeI tie = (NativeI)(z.part[i] == at) & ((NativeI)ids.part[i] <= cut.id);
        return (NativeF)(((NativeI)(z.part[i] > at) | tie) & (NativeI)x.part[i]);
    });
}

void weights(const float* z, const std::int32_t* ids, int n, float max, Cut cut, float* out) {
    for (int i = 0; i < n; i += kLanes) {
        const f32x16 at = load(z + i);
        store(out + i, keep(at, load(ids + i), cut, exp(at - splat(max))));
    }
}

float blocked_sum(const float* x, int n) {
    float total = 0;
    for (int i = 0; i < n; i += kSumBlock) {
        const int size = n - i < kSumBlock ? n - i : kSumBlock;
        total = total + lane_sum(size, [&](int j) { return load(x + i + j); });
    }
    return total;
}

void divide_all(const float* x, int n, float by, float* out) {
    for (int i = 0; i < n; i += kLanes) store(out + i, load(x + i) / splat(by));
}

// "lowbias32", a bijective 32-bit hash.
BITMTP_INLINE u32x16 mix32(u32x16 x) {
    x = x ^ (x >> 16);
    x = x * splat(0x7feb352du);
    x = x ^ (x >> 15);
    x = x * splat(0x846ca68bu);
    return x ^ (x >> 16);
}

BITMTP_INLINE f32x16 gumbel(u32x16 ids, NoiseKey key) {
    const u32x16 h = mix32(mix32(ids * splat(0x9e3779b1u) + splat(key.low)) ^ splat(key.high)) >> 9;
    const f32x16 whole = each<NativeF>([&](int i) { return __builtin_convertvector((NativeI)h.part[i], NativeF); });
    const f32x16 u = (whole + splat(0.5f)) * splat(0x1p-23f);
    return -log(-log(u));
}

int best_noisy(const float* z, const std::int32_t* ids, int n, float max, Cut cut, float min_p, NoiseKey key) {
    constexpr float kMostNoise = 16.7f;  // -log(-log(u)) of the largest u, rounded up
    const f32x16 none = splat(kNever);
    float best = kNever;
    int index = 0;
    for (int i = 0; i < n; i += kLanes) {
        const f32x16 at = load(z + i);
        if (fold_max(at) + kMostNoise < best) continue;
        const u32x16 id = load(ids + i);
        const f32x16 weight = keep(at, id, cut, exp(at - splat(max)));
        const f32x16 kept = keep(at, id, cut, splat(1.0f));
        const f32x16 noisy = where_less(weight, splat(min_p), none, at + gumbel(id, key));
        float lanes[kLanes];
        store(lanes, where_less(kept, splat(1.0f), none, noisy));
        for (int lane = 0; lane < kLanes; ++lane) {
            if (lanes[lane] > best || (lanes[lane] == best && ids[i + lane] < ids[index])) {
                best = lanes[lane];
                index = i + lane;
            }
        }
    }
    return index;
}

}  // namespace bitmtp::BITMTP_ISA
