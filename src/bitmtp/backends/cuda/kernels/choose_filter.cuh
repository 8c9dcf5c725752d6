// Top-k, top-p and min-p, exactly. `gather` weighs all logits and lists those near the largest; `filter`, one block a row,
// finds the thresholds in that list, or in the whole row where the list does not reach.
#pragma once

#include "choose_threshold.cuh"

constexpr float NEAR = 10.0f;  // nats below the largest
constexpr int LISTED = 8192;
constexpr int FILTER_THREADS = 1024;

DEVICE u64 block_total(u64 x, u64* shared, int warps) {
    const u64 own = warp_total(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = own;
    __syncthreads();
    u64 total = 0;
    for (int i = 0; i < warps; i++) total += shared[i];
    return total;
}

DEVICE u64 block_best(u64 key, u64* shared, int warps) {
    const u64 own = warp_best(key);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = own;
    __syncthreads();
    u64 best = 0;
    for (int i = 0; i < warps; i++) best = greater(best, shared[i]);
    return best;
}

DEVICE float block_largest(const Partial* chunks, u64* shared, int warps) {
    u64 best = 0;
    for (int i = threadIdx.x; i < CHUNKS; i += warps * 32) best = greater(best, key_of(chunks[i].scaled, 0));
    return value_of(block_best(best, shared, warps));
}

// Whether the row has a filter; every thread of a block gets the same answer.
DEVICE bool has_filter(const Pass* pass, int row) {
    const Row& own = pass->rows[row];
    return row < pass->width && own.head != HEAD_NONE && own.choice >= 0 && filters(pass->choices[own.choice]);
}

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
    gather(const Pass* pass, const float* scaled, const Partial* chunks, u64* totals, u64* lists, int* counts) {
    __shared__ u64 shared[CHUNK_WARPS];
    __shared__ int found, place;
    const int row = blockIdx.y, first = blockIdx.x * CHUNK + threadIdx.x * 4;
    wait_for_previous();
    let_next_start();
    if (!has_filter(pass, row)) return;
    float4 read = make_float4(NOTHING, NOTHING, NOTHING, NOTHING);
    if (first < VOCAB) read = *(const float4*)&scaled[(long long)row * VOCAB_PADDED + first];
    if (threadIdx.x == 0) found = 0;
    const float largest = block_largest(chunks + row * CHUNKS, shared, CHUNK_WARPS);
    const float x[4] = {read.x, read.y, read.z, read.w};
    u64 weight = 0;
    int mine[4];
    for (int i = 0; i < 4; i++) {
        const bool is_id = first + i < VOCAB;
        weight += is_id ? weight_of(x[i] - largest) : 0;
        mine[i] = is_id && largest - x[i] < NEAR ? atomicAdd(&found, 1) : -1;
    }
    const u64 total = block_total(weight, shared, CHUNK_WARPS);
    if (threadIdx.x == 0) {
        totals[row * CHUNKS + blockIdx.x] = total;
        place = found ? atomicAdd(&counts[row], found) : 0;
    }
    if (found == 0) return;
    __syncthreads();
    for (int i = 0; i < 4; i++)
        if (mine[i] >= 0 && place + mine[i] < LISTED) lists[row * LISTED + place + mine[i]] = key_of(x[i], first + i);
}

DEVICE u64 weigh(const Keys& keys, u64 least, u64* shared) {
    u64 weight = 0;
    keys.each([&](u64 key) { weight += key >= least ? keys.weight(key) : 0; });
    return block_total(weight, shared, FILTER_THREADS / 32);
}

// Whether everything that may be kept is in the list of `count` keys.
DEVICE bool reaches(const Keys& list, const Choice& choice, int top_k, u64 total, u64* shared) {
    if (list.count > LISTED) return false;
    if (top_k) return list.count >= top_k;
    if (choice.top_p < 1) return weigh(list, 0, shared) >= goal_of(choice.top_p, total);
    return choice.min_p > 2.0f * exp_(-NEAR);
}

extern "C" __global__ void __launch_bounds__(FILTER_THREADS, 1)
    filter(const Pass* pass, const float* logits, const float* scaled, const Partial* chunks, const Stats* stats,
           const u64* totals, u64* lists, int* counts, Output* outputs) {
    constexpr int WARPS = FILTER_THREADS / 32;
    __shared__ u64 shared[WARPS];
    __shared__ Digits digits;
    const int row = blockIdx.x;
    wait_for_previous();
    let_next_start();
    if (!has_filter(pass, row)) return;
    const Choice& choice = pass->choices[pass->rows[row].choice];
    const int top_k = choice.top_k < VOCAB ? choice.top_k : 0;
    const float largest = block_largest(chunks + row * CHUNKS, shared, WARPS);
    u64 total = 0;
    for (int i = threadIdx.x; i < CHUNKS; i += FILTER_THREADS) total += totals[row * CHUNKS + i];
    total = block_total(total, shared, WARPS);
    const float* own = scaled + (long long)row * VOCAB_PADDED;
    u64* list = lists + row * LISTED;
    Keys keys = {list, own, counts[row], largest};
    unsigned room = 0;  // what lies in the list is needed
    if (!reaches(keys, choice, top_k, total, shared)) keys = {nullptr, own, VOCAB, largest}, room = LISTED;
    u64 least = 0;
    if (top_k) {
        least = threshold<false>(keys, 0, top_k, digits, list, room);
        if (top_k <= room) keys = narrowed(keys, [&](u64 key) { return key >= least; }, list, digits), room = 0;
        total = weigh(keys, least, shared);
    }
    if (choice.top_p < 1) least = threshold<true>(keys, least, goal_of(choice.top_p, total), digits, list, room);
    const u64 noise = noise_key(choice, pass->rows[row].position);
    u64 best = 0;
    keys.each([&](u64 key) {
        const float z = value_of(key);
        if (key >= least && exp_(z - largest) >= choice.min_p)
            best = greater(best, key_of(z + gumbel(noise, id_of(key)), id_of(key)));
    });
    best = block_best(best, shared, WARPS);  // every thread has read counts[row] by now
    if (threadIdx.x > 0) return;
    const int token = id_of(best);
    counts[row] = 0;
    outputs[row].token = token;
    outputs[row].probability = exp_(logits[(long long)row * VOCAB_PADDED + token] - stats[row].largest) / stats[row].sum;
}
