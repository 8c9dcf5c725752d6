// The first look at a row's logits: maxima, sums and the best token of each chunk of the vocabulary.
#pragma once

#include "choose_common.cuh"

struct Four {
    float at[4];  // logits of four ids in a row
};

// Penalties, bias and grammar for the block's ids. The lists are walked whole: their loads do not wait for one another, as
// those of a search would.
DEVICE Four adjust(const Four& raw, const Choice& choice, int start, float* shared) {
    Four x = raw;
    const int first = start + threadIdx.x * 4;
    if (choice.num_seen || choice.num_biased) {
        *(float4*)&shared[threadIdx.x * 4] = make_float4(x.at[0], x.at[1], x.at[2], x.at[3]);
        __syncthreads();
        for (int i = threadIdx.x; i < choice.num_seen; i += CHUNK_THREADS) {
            const unsigned place = choice.seen[i] - start;
            if (place < CHUNK) shared[place] = penalise(shared[place], choice.counts[i], choice);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < choice.num_biased; i += CHUNK_THREADS) {
            const unsigned place = choice.biased[i] - start;
            if (place < CHUNK) shared[place] += choice.bias[i];
        }
        __syncthreads();
        for (int i = 0; i < 4; i++) x.at[i] = shared[threadIdx.x * 4 + i];
    }
    if (choice.allowed && first < VOCAB) {
        const unsigned bits = choice.allowed[first >> 5] >> (first & 31);
        for (int i = 0; i < 4; i++) x.at[i] = bits >> i & 1 ? x.at[i] : -__int_as_float(0x7f800000);
    }
    return x;
}

template <bool ADJUSTED>
DEVICE void partials_of(const Pass* pass, const float* logits, Partial* chunks, float* slices, float* scaled) {
    __shared__ Partial warps[CHUNK_WARPS];
    __shared__ __align__(16) float adjusted[ADJUSTED ? CHUNK : 4];
    const int row = blockIdx.y, chunk = blockIdx.x, start = chunk * CHUNK, first = start + threadIdx.x * 4;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    wait_for_previous();
    let_next_start();
    float4 read = make_float4(NOTHING, NOTHING, NOTHING, NOTHING);
    if (first < VOCAB) read = *(const float4*)&logits[(long long)row * VOCAB_PADDED + first];
    const int width = pass->width, number = pass->rows[row].choice, position = pass->rows[row].position;
    if (row >= width || pass->rows[row].head == HEAD_NONE) return;
    Four raw = {read.x, read.y, read.z, read.w};
    for (int i = 0; i < 4; i++) raw.at[i] = first + i < VOCAB ? raw.at[i] : NOTHING;
    Four x = raw;
    u64 keys[4];
    const Choice* choice = number >= 0 ? &pass->choices[number] : nullptr;
    if (ADJUSTED && choice) x = adjust(raw, *choice, start, adjusted);
    if (choice && choice->temperature > 0) {
        const u64 noise = noise_key(*choice, position);
        for (int i = 0; i < 4; i++) {
            x.at[i] = x.at[i] / choice->temperature;
            keys[i] = key_of(x.at[i] + gumbel(noise, first + i), first + i);
        }
        if (ADJUSTED && first < VOCAB && filters(*choice))
            *(float4*)&scaled[(long long)row * VOCAB_PADDED + first] = make_float4(x.at[0], x.at[1], x.at[2], x.at[3]);
    } else {
        for (int i = 0; i < 4; i++) keys[i] = key_of(x.at[i], first + i);
    }
    Partial ids[4];
    for (int i = 0; i < 4; i++) ids[i] = {raw.at[i], 1.0f, 0.0f, raw.at[i], first + i < VOCAB ? keys[i] : 0, x.at[i], 0};
    const Partial own = warp_join(ids);
    if (lane == 0) {
        warps[warp] = own;
        slices[row * SLICES + chunk * CHUNK_WARPS + warp] = own.largest;
    }
    __syncthreads();
    if (warp > 0) return;
    const Partial joined[1] = {lane < CHUNK_WARPS ? warps[lane] : EMPTY};
    const Partial all = warp_join(joined);
    if (lane == 0) chunks[row * CHUNKS + chunk] = all;
}

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
    partials(const Pass* pass, const float* logits, Partial* chunks, float* slices) {
    partials_of<false>(pass, logits, chunks, slices, nullptr);
}

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 1)
    partials_adjusted(const Pass* pass, const float* logits, Partial* chunks, float* slices, float* scaled) {
    partials_of<true>(pass, logits, chunks, slices, scaled);
}
