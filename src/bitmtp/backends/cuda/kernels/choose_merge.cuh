// The second look: a row's token, probability and entropy from its chunks, and its best raw logits.
#pragma once

#include "choose_threshold.cuh"

constexpr int MERGE_THREADS = 256;
constexpr int MERGE_WARPS = MERGE_THREADS / 32;
constexpr int FINALISTS = 2048;

struct Finals {
    float group_largest[MERGE_WARPS][32];
    int slices[SLICES];
    int num_slices, num_keys;
    u64 keys[FINALISTS];
    Digits digits;
};

DEVICE Partial join_chunks(const Partial* chunks, int lane) {
    constexpr int HELD = (CHUNKS + 31) / 32;
    Partial own[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) own[i] = lane + i * 32 < CHUNKS ? chunks[lane + i * 32] : EMPTY;
    return warp_join(own);
}

// A bound that at least `wanted` logits reach: slices are dealt into 16 or 32 groups, and each group's largest logit
// reaches the least of these. Groups interleave, because frequent tokens have ids close together.
DEVICE float bound_of(const float* slices, int wanted, Finals& finals) {
    const int groups = wanted <= 16 ? 16 : 32, lane = threadIdx.x % 32;
    float largest = NOTHING;
    for (int i = threadIdx.x; i < SLICES; i += MERGE_THREADS) largest = fmaxf(largest, slices[i]);
    if (groups == 16) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 16));
    finals.group_largest[threadIdx.x / 32][lane] = largest;
    __syncthreads();
    largest = finals.group_largest[0][lane];
    for (int i = 1; i < MERGE_WARPS; i++) largest = fmaxf(largest, finals.group_largest[i][lane]);
    return unordered(__reduce_min_sync(ALL_LANES, ordered(largest)));
}

// Collects the keys of all logits that reach the bound; how many there are, which may be more than have room.
DEVICE int collect(const float* logits, const float* slices, float bound, Finals& finals) {
    for (int i = threadIdx.x; i < SLICES; i += MERGE_THREADS)
        if (slices[i] >= bound) finals.slices[atomicAdd(&finals.num_slices, 1)] = i;
    __syncthreads();
    constexpr int AT_ONCE = 8;  // loads in flight
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int base = warp; base < finals.num_slices; base += AT_ONCE * MERGE_WARPS) {
        float4 read[AT_ONCE];
        int first[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int place = base + i * MERGE_WARPS;
            first[i] = place < finals.num_slices ? finals.slices[place] * SLICE + lane * 4 : VOCAB;
            if (first[i] < VOCAB) read[i] = *(const float4*)&logits[first[i]];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const float x[4] = {read[i].x, read[i].y, read[i].z, read[i].w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (first[i] + j >= VOCAB || x[j] < bound) continue;
                const int place = atomicAdd(&finals.num_keys, 1);
                if (place < FINALISTS) finals.keys[place] = key_of(x[j], first[i] + j);
            }
        }
    }
    __syncthreads();
    return finals.num_keys;
}

// All ids that reach the n-th largest key exactly: for rows of which too many logits reach the bound (ties, mostly).
DEVICE int collect_exactly(const float* logits, int wanted, Finals& finals) {
    const Keys keys = {nullptr, logits, VOCAB, 0.0f};
    const u64 least = threshold<false>(keys, 0, wanted, finals.digits);
    if (threadIdx.x == 0) finals.num_keys = 0;
    __syncthreads();
    keys.each([&](u64 key) {
        if (key >= least) finals.keys[atomicAdd(&finals.num_keys, 1)] = key;
    });
    __syncthreads();
    return finals.num_keys;
}

// The `wanted` greatest keys, best first, into finals.keys[0 … wanted - 1].
DEVICE void select(const float* logits, const float* slices, int wanted, Finals& finals) {
    if (threadIdx.x == 0) finals.num_slices = finals.num_keys = 0;
    const float bound = bound_of(slices, wanted, finals);
    int count = collect(logits, slices, bound, finals);
    if (count > FINALISTS) count = collect_exactly(logits, wanted, finals);
    u64 own[FINALISTS / MERGE_THREADS];
    int ranks[FINALISTS / MERGE_THREADS];
#pragma unroll
    for (int i = 0; i < FINALISTS / MERGE_THREADS; i++) {
        const int mine = threadIdx.x + i * MERGE_THREADS;
        ranks[i] = wanted;
        if (mine >= count) continue;
        own[i] = finals.keys[mine];
        ranks[i] = 0;
        for (int j = 0; j < count; j++) ranks[i] += finals.keys[j] > own[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < FINALISTS / MERGE_THREADS; i++)
        if (ranks[i] < wanted) finals.keys[ranks[i]] = own[i];
    __syncthreads();
}

// One warp: the candidates of a mask row.
DEVICE void write_candidates(const u64* keys, const Stats& stats, Candidates* to, int lane) {
    const bool is_one = lane < CANDIDATES && lane < VOCAB;
    const float x = is_one ? value_of(keys[lane]) : NOTHING;
    const float share = warp_sum(exp_(x - stats.largest)) / stats.sum;
    if (lane < CANDIDATES) to->ids[lane] = is_one ? id_of(keys[lane]) : 0, to->logits[lane] = x;
    if (lane == 0) to->share = share;
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS, 1)
    merge(const Pass* pass, const float* logits, const Partial* chunks, const float* slices, Stats* stats,
          Candidates* candidates, Output* outputs) {
    __shared__ Finals finals;
    const int row = blockIdx.x, lane = threadIdx.x % 32;
    wait_for_previous();
    let_next_start();
    const int head = pass->rows[row].head, token = pass->rows[row].token;
    if (row >= pass->width || head == HEAD_NONE) return;
    const bool chained = RANK > 0 && token < 0;
    const int top = pass->top < VOCAB ? pass->top : VOCAB, least = chained && top < CANDIDATES ? CANDIDATES : top;
    const int wanted = least < VOCAB ? least : VOCAB;
    Stats own;
    if (threadIdx.x < 32) {
        const Partial all = join_chunks(chunks + row * CHUNKS, lane);
        own = {all.largest, all.sum};
        if (lane == 0) {
            stats[row] = own;
            outputs[row].token = id_of(all.best);
            outputs[row].probability = exp_(all.raw - all.largest) / all.sum;
            outputs[row].entropy = log_(all.sum) - all.weighted / all.sum;
            outputs[row].parent = -1;
        }
    }
    if (wanted == 0) return;
    select(logits + (long long)row * VOCAB_PADDED, slices + row * SLICES, wanted, finals);
    if (threadIdx.x >= 32) return;
    if (lane < top) {
        outputs[row].top_ids[lane] = id_of(finals.keys[lane]);
        outputs[row].top_logits[lane] = value_of(finals.keys[lane]);
    }
    if (chained) write_candidates(finals.keys, own, &candidates[row], lane);
}
