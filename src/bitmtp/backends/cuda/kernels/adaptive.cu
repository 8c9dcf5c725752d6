// The kernel before each pass of the adaptive loop: takes what the pass before it says, decides, commits, sends, writes the rows
// of the next one, and says which of the captured passes it is.
//
//   WHILE(again) { turn · SWITCH(body) { a pass of each width class, without masks and with } }
#include "adaptive.hpp"
#include "desk.cuh"

// What the warp works on, in shared memory.
struct Desk {
    decisions::Loop loop;
    adaptive::Tuning tuning;
    adaptive::Shaper shaper;
    decisions::Kept kept;
    decisions::Chosen chosen[MAX_WIDTH];
    adaptive::Scratch scratch;
};

extern "C" __global__ void __launch_bounds__(LANES)
    turn(decisions::Loop* loop, const adaptive::Tuning* tuning, adaptive::Shaper* shaper, Pass* pass, const Output* outputs,
         decisions::Ring* ring, cudaGraphConditionalHandle again, cudaGraphConditionalHandle body) {
    __shared__ Desk desk;
    decisions::Control control = read_control(ring);
    Words<decisions::Loop> loop_words = fetch(loop);
    Words<adaptive::Tuning> tuning_words = fetch(tuning);
    Words<adaptive::Shaper> shaper_words = fetch(shaper);
    Choices choices = fetch_choices(outputs);
    loop_words.put(&desk.loop);
    tuning_words.put(&desk.tuning);
    shaper_words.put(&desk.shaper);
    choices.put(desk.chosen);
    __syncwarp();
    adaptive::turn(desk.loop, desk.tuning, desk.shaper, *pass, desk.chosen, desk.kept, *ring, control, desk.scratch);
    fetch(&desk.shaper).put(shaper);
    set_condition(body, desk.shaper.body);
    leave(loop, desk.loop, again);
}
