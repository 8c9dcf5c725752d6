// The kernels between the passes of the resident loop: decide, commit, send, and write the rows of the next pass.
//
//   begin · WHILE(again) { draft pass · judge · IF(verify) { verify pass · accept } }
//
// One warp each. What the host says is asked for before the wait, so that the way over the bus is hidden behind the pass
// where kernels overlap.
#include "desk.cuh"

using decisions::Chosen;
using decisions::Control;
using decisions::Kept;
using decisions::Loop;
using decisions::Ring;

// What the warp works on, in shared memory.
struct Desk {
    Loop loop;
    Kept kept;
    Chosen chosen[MAX_WIDTH];
};

DEVICE void load(Desk& desk, const Loop* memory, const Output* outputs) {
    Choices choices = fetch_choices(outputs);
    Words<Loop> loop = fetch(memory);
    loop.put(&desk.loop);
    choices.put(desk.chosen);
    __syncwarp();
}

// Leaves a pause; what has ended stays ended.
extern "C" __global__ void __launch_bounds__(LANES)
    begin(Loop* memory, Pass* pass, const Ring* ring, cudaGraphConditionalHandle again) {
    __shared__ Loop loop;
    Control control = read_control(ring);
    wait_for_previous();
    let_next_start();
    fetch(memory).put(&loop);
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
