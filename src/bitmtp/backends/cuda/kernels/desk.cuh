// What the kernels between passes share: one warp, with all that it needs brought into shared memory at once.
#pragma once

#include "common.cuh"
#include "iteration.hpp"

extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(cudaGraphConditionalHandle, unsigned int);

constexpr int LANES = 32;
constexpr int ROW_TURNS = MAX_WIDTH / LANES;

// A structure on its way between memories, spread over the lanes: all that is fetched before anything is put away comes in the
// time of one.
template <class T>
struct Words {
    static constexpr int COUNT = sizeof(T) / sizeof(uint4), TURNS = (COUNT + LANES - 1) / LANES;
    static_assert(sizeof(T) % sizeof(uint4) == 0, "a structure is copied 16 bytes at a time");
    uint4 at[TURNS];

    // Lanes behind the last word repeat it.
    DEVICE static int place(int turn) { return decisions::least(turn * LANES + int(threadIdx.x), COUNT - 1); }

    DEVICE void put(T* to) const {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) reinterpret_cast<uint4*>(to)[place(turn)] = at[turn];
    }
};

template <class T>
DEVICE Words<T> fetch(const T* from) {
    Words<T> words;
#pragma unroll
    for (int turn = 0; turn < Words<T>::TURNS; ++turn)
        words.at[turn] = reinterpret_cast<const uint4*>(from)[Words<T>::place(turn)];
    return words;
}

// Every output, asked for or not: which of them count, only the loop says.
struct Choices {
    decisions::Chosen at[ROW_TURNS];

    DEVICE void put(decisions::Chosen* to) const {
#pragma unroll
        for (int turn = 0; turn < ROW_TURNS; ++turn) to[turn * LANES + threadIdx.x] = at[turn];
    }
};

DEVICE Choices fetch_choices(const Output* outputs) {
    Choices choices;
#pragma unroll
    for (int turn = 0; turn < ROW_TURNS; ++turn) {
        const Output& output = outputs[turn * LANES + threadIdx.x];
        choices.at[turn] = {output.token, output.probability, output.entropy};
    }
    return choices;
}

// Both counters in one read; volatile: the host changes them while the loop runs.
DEVICE decisions::Control read_control(const decisions::Ring* ring) {
    unsigned long long both = *reinterpret_cast<const volatile unsigned long long*>(&ring->received);
    return {unsigned(both), int(both >> 32)};
}

DEVICE void set_condition(cudaGraphConditionalHandle condition, unsigned value) {
    if (threadIdx.x == 0) cudaGraphSetConditional(condition, value);
}

// A loop as it is now goes back to memory, and goes on or not.
DEVICE void leave(decisions::Loop* memory, const decisions::Loop& loop, cudaGraphConditionalHandle again) {
    fetch(&loop).put(memory);
    set_condition(again, loop.status == decisions::RUNNING);
}
