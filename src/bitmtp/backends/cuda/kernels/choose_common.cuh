// What the kernels of choosing share: keys that order logits, keyed noise, and the records they pass on.
//
// Constants: VOCAB, VOCAB_PADDED (stride of a row of logits), RANK (of the chain, padded to 256; 0: no chain).
#pragma once

#include "common.cuh"

using u64 = unsigned long long;

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int SLICE = 128;  // ids that one warp looks at
constexpr int CHUNK = 1024;  // ids that one block looks at
constexpr int CHUNK_THREADS = CHUNK / 4;
constexpr int CHUNK_WARPS = CHUNK / SLICE;
constexpr int CHUNKS = (VOCAB + CHUNK - 1) / CHUNK;
constexpr int SLICES = CHUNKS * CHUNK_WARPS;
constexpr int CANDIDATES = 16;               // that the chain scores again
constexpr float NOTHING = -1e30f;            // stands for ids past the vocabulary; finite, so that 0 * it is 0

// Of one chunk of one row. Sums are relative to `largest`.
struct __align__(16) Partial {
    float largest, sum, weighted;  // max x, sum of e^(x - max), sum of e^(x - max) * (x - max)
    float raw;                     // the logit of the best
    u64 best;                      // key of the best by the row's rules, filters left out
    float scaled;                  // largest logit after penalties and temperature
    int reserved;
};

#define EMPTY \
    Partial { NOTHING, 0.0f, 0.0f, NOTHING, 0, NOTHING, 0 }

struct Stats {
    float largest, sum;  // of a whole row; probability(x) = e^(x - largest) / sum
};

// The best raw logits of a mask row, best first; `share` is their part of the probability.
struct __align__(16) Candidates {
    int ids[CANDIDATES];
    float logits[CANDIDATES];
    float share;
    int reserved[3];
};

// Floats as integers of the same order; -0 and 0 are one.
DEVICE unsigned ordered(float x) {
    const unsigned bits = __float_as_uint(x + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

DEVICE float unordered(unsigned bits) { return __uint_as_float(bits ^ (bits >> 31 ? 0x80000000u : 0xffffffffu)); }

// Greater logits have greater keys, and among equal ones lower ids. 0 is below every key.
DEVICE u64 key_of(float x, int id) { return (u64)ordered(x) << 32 | (unsigned)~id; }
DEVICE int id_of(u64 key) { return ~(int)(unsigned)key; }
DEVICE float value_of(u64 key) { return unordered((unsigned)(key >> 32)); }

DEVICE u64 greater(u64 a, u64 b) { return a > b ? a : b; }

DEVICE u64 warp_best(u64 key) {
    const unsigned high = key >> 32, best = __reduce_max_sync(ALL_LANES, high);
    const unsigned low = __reduce_max_sync(ALL_LANES, high == best ? (unsigned)key : 0u);
    return (u64)best << 32 | low;
}

DEVICE float warp_largest(float x) { return unordered(__reduce_max_sync(ALL_LANES, ordered(x))); }

// Joins what all lanes of a warp hold, N records a lane.
template <int N>
DEVICE Partial warp_join(const Partial (&own)[N]) {
    Partial all = own[0];
#pragma unroll
    for (int i = 1; i < N; i++) {
        all.largest = fmaxf(all.largest, own[i].largest);
        all.scaled = fmaxf(all.scaled, own[i].scaled);
        if (own[i].best > all.best) all.best = own[i].best, all.raw = own[i].raw;
    }
    all.largest = warp_largest(all.largest);
    all.scaled = warp_largest(all.scaled);
    const u64 best = warp_best(all.best);
    all.raw = __shfl_sync(ALL_LANES, all.raw, __ffs(__ballot_sync(ALL_LANES, all.best == best)) - 1);
    all.best = best;
    all.sum = all.weighted = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float below = own[i].largest - all.largest, e = exp_(below);
        all.sum += own[i].sum * e;
        all.weighted += (own[i].weighted + below * own[i].sum) * e;
    }
    all.sum = warp_sum(all.sum);
    all.weighted = warp_sum(all.weighted);
    return all;
}

DEVICE u64 warp_total(u64 x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
}

DEVICE unsigned mix32(unsigned x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

DEVICE u64 mix64(u64 x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

// Key of the noise of the token that follows a row at `position`.
DEVICE u64 noise_key(const Choice& choice, int position) { return mix64(choice.key + (u64)(position + 1)); }

// Gumbel noise of one id. The hardware logarithm has an absolute error near 1, where -log(u) decides who wins; there the
// first terms of its series in 1 - u, which is exact, take its place.
DEVICE float gumbel(u64 key, int id) {
    const unsigned h = mix32(mix32((unsigned)id * 0x9E3779B1u + (unsigned)key) ^ (unsigned)(key >> 32)) >> 9;
    const float u = ((float)h + 0.5f) * 0x1p-23f, w = 1.0f - u;
    const float near = w + w * w * (0.5f + w * (0.333333333f + w * 0.25f));
    return -log_(w < 0.015625f ? near : -log_(u));
}

DEVICE bool filters(const Choice& choice) {
    return choice.temperature > 0 && ((choice.top_k > 0 && choice.top_k < VOCAB) || choice.top_p < 1 || choice.min_p > 0);
}

DEVICE float penalise(float x, int count, const Choice& choice) {
    const float scaled = x > 0 ? x / choice.repetition : x * choice.repetition;
    return scaled - (choice.frequency * (float)count + (count > 0 ? choice.presence : 0.0f));
}

// Weights of top-p as integers, so that no order of adding them matters.
DEVICE u64 weight_of(float below_largest) { return __float2ull_rn(exp_(below_largest) * 0x1p40f); }

// Tokens are kept while the sum of the weights before them is below this.
DEVICE u64 goal_of(float top_p, u64 total) {
    const u64 goal = __double2ull_ru((double)top_p * (double)total);
    return goal < 1 ? 1 : goal > total ? total : goal;
}
