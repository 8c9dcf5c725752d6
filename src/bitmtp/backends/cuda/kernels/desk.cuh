// What the kernels between passes share: one warp, with all that it needs brought into shared memory at once.
#pragma once

#include "common.cuh"
#include "pass.cuh"
#include "ring.hpp"

extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(cudaGraphConditionalHandle, unsigned int);

constexpr int LANES = 32;
constexpr int ROW_TURNS = MAX_WIDTH / LANES;

// A structure on its way between memories, spread over the lanes: all that is fetched before anything is put away comes in the
// time of one.
template <class T, int BYTES = sizeof(T)>
struct Words {
    static constexpr int COUNT = BYTES / sizeof(uint4), TURNS = (COUNT + LANES - 1) / LANES;
    static_assert(BYTES % sizeof(uint4) == 0, "a structure is copied 16 bytes at a time");
    uint4 at[TURNS];

    // Lanes behind the last word repeat it.
    DEVICE static int place(int turn) { return core::least(turn * LANES + int(threadIdx.x), COUNT - 1); }

    DEVICE void put(T* to) const {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) reinterpret_cast<uint4*>(to)[place(turn)] = at[turn];
    }
};

template <class T, int BYTES = sizeof(T)>
DEVICE Words<T, BYTES> fetch(const T* from) {
    Words<T, BYTES> words;
#pragma unroll
    for (int turn = 0; turn < words.TURNS; ++turn)
        words.at[turn] = reinterpret_cast<const uint4*>(from)[words.place(turn)];
    return words;
}

// Of a text all but its last part, which is the host's.
constexpr int RECORD = core::RECORD_BYTES;

// Every output, asked for or not: which of them count, only the loop says.
struct Choices {
    core::Output at[ROW_TURNS];

    DEVICE void put(core::Output* to) const {
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
DEVICE core::Control read_control(const core::Ring* ring) {
    unsigned long long both = *reinterpret_cast<const volatile unsigned long long*>(&ring->received);
    return {unsigned(both), int(both >> 32)};
}

DEVICE void set_condition(cudaGraphConditionalHandle condition, unsigned value) {
    if (threadIdx.x == 0) cudaGraphSetConditional(condition, value);
}
