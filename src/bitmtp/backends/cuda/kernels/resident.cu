// The kernels between the passes of the resident loop: decide, commit, send, and write the rows of the next pass.
//
//   begin · WHILE(again) { draft pass · judge · IF(verify) { verify pass · accept } }
//
// One warp each. All that they need is loaded at once into shared memory; what the host says is asked for before the
// wait, so that the way over the bus is hidden behind the pass where kernels overlap.
#include "common.cuh"
#include "decisions.hpp"

extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(cudaGraphConditionalHandle, unsigned int);

using decisions::Chosen;
using decisions::Control;
using decisions::Kept;
using decisions::Loop;
using decisions::Ring;

constexpr int LANES = 32;
constexpr int WORDS = sizeof(Loop) / sizeof(uint4);
constexpr int LOOP_TURNS = (WORDS + LANES - 1) / LANES;
constexpr int ROW_TURNS = MAX_WIDTH / LANES;
static_assert(sizeof(Loop) % sizeof(uint4) == 0, "a loop is copied 16 bytes at a time");

// What the warp works on, in shared memory.
struct Desk {
    Loop loop;
    Kept kept;
    Chosen chosen[MAX_WIDTH];
};

// Both counters in one read; volatile: the host changes them while the loop runs.
DEVICE Control read_control(const Ring* ring) {
    unsigned long long both = *reinterpret_cast<const volatile unsigned long long*>(&ring->received);
    return {unsigned(both), int(both >> 32)};
}

// Lanes behind the last word repeat it.
DEVICE int word_of(int turn) { return decisions::least(turn * LANES + int(threadIdx.x), WORDS - 1); }

DEVICE void copy(Loop* to, const Loop* from) {
    uint4 words[LOOP_TURNS];
#pragma unroll
    for (int turn = 0; turn < LOOP_TURNS; ++turn) words[turn] = reinterpret_cast<const uint4*>(from)[word_of(turn)];
#pragma unroll
    for (int turn = 0; turn < LOOP_TURNS; ++turn) reinterpret_cast<uint4*>(to)[word_of(turn)] = words[turn];
}

// Every output, asked for or not, on its way together with the loop: which of them count, only the loop says.
DEVICE void load(Desk& desk, const Loop* memory, const Output* outputs) {
    Chosen chosen[ROW_TURNS];
#pragma unroll
    for (int turn = 0; turn < ROW_TURNS; ++turn) {
        const Output& output = outputs[turn * LANES + threadIdx.x];
        chosen[turn] = {output.token, output.probability};
    }
    copy(&desk.loop, memory);
#pragma unroll
    for (int turn = 0; turn < ROW_TURNS; ++turn) desk.chosen[turn * LANES + threadIdx.x] = chosen[turn];
    __syncwarp();
}

DEVICE void set_condition(cudaGraphConditionalHandle condition, bool value) {
    if (threadIdx.x == 0) cudaGraphSetConditional(condition, value);
}

// The loop as it is now goes back to memory, and goes on or not.
DEVICE void leave(Loop* memory, const Loop& loop, cudaGraphConditionalHandle again) {
    copy(memory, &loop);
    set_condition(again, loop.status == decisions::RUNNING);
}

// Leaves a pause; what has ended stays ended.
extern "C" __global__ void __launch_bounds__(LANES)
    begin(Loop* memory, Pass* pass, const Ring* ring, cudaGraphConditionalHandle again) {
    __shared__ Loop loop;
    Control control = read_control(ring);
    wait_for_previous();
    let_next_start();
    copy(&loop, memory);
    __syncwarp();
    decisions::advance(loop, *pass, control);
    leave(memory, loop, again);
}

extern "C" __global__ void __launch_bounds__(LANES)
    judge(Loop* memory, Pass* pass, const Output* outputs, Ring* ring, cudaGraphConditionalHandle again,
          cudaGraphConditionalHandle verify) {
    __shared__ Desk desk;
    Control control = read_control(ring);
    wait_for_previous();
    let_next_start();
    load(desk, memory, outputs);
    bool verifying = decisions::after_draft(desk.loop, *pass, desk.chosen, desk.kept, *ring, control);
    set_condition(verify, verifying);
    leave(memory, desk.loop, again);
}

extern "C" __global__ void __launch_bounds__(LANES)
    accept(Loop* memory, Pass* pass, const Output* outputs, Ring* ring, cudaGraphConditionalHandle again) {
    __shared__ Desk desk;
    Control control = read_control(ring);
    wait_for_previous();
    let_next_start();
    load(desk, memory, outputs);
    decisions::after_verify(desk.loop, *pass, desk.chosen, desk.kept, *ring, control);
    leave(memory, desk.loop, again);
}
