// The kernel between two passes of a text's loop: takes what the pass before says, commits, sends, decides, and writes the rows
// of the next one. One warp; what the host says is asked for before the wait, so that the way over the bus is hidden behind the
// pass where kernels overlap.
//
//   one kind of pass:   turn · WHILE(again) { pass · turn }
//   draft and verify:   turn · WHILE(again) { draft pass · turn · IF(check) { verify pass · turn } }
//   adaptive:           WHILE(again) { turn · SWITCH(body) { a pass of each width class, without masks and with } }
//
// Constants: ADAPTIVE (the policy is `auto`).
#include "desk.cuh"

using core::Costs;
using core::Course;
using core::Text;

constexpr int CLASSES = 7;  // of widths: 1, 2, 4, … 64; from 2 on there is one with masks too
constexpr int NO_BODY = 2 * CLASSES - 1;

// What the warp works on, in shared memory.
struct Desk {
    Text text;
    Costs costs;
    Course course;
    core::Kept kept;
    core::History history;
    core::Scratch scratch;
    core::Output chosen[MAX_WIDTH];
};

DEVICE unsigned long long now() {
    unsigned long long nanoseconds;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

// A cost that has been seen often enough is left alone: learning takes a card's single lane long.
DEVICE void learn(Costs& costs, const Text& text, unsigned long long time) {
    constexpr int ENOUGH = 8;
    if (!costs.learning) return;
    int width = text.plan.width, seen = core::times_seen(costs, width, text.materialized);
    core::once([&] {
        if (costs.stamp && seen < ENOUGH)
            core::learn_cost(costs, width, text.materialized, double(time - costs.stamp) * 1e-6);
        else
            costs.rested += 1;
    });
}

DEVICE int body_of(const core::Plan& plan) {
    int index = 0;
    while (1 << index < plan.width) ++index;
    return plan.running == core::DRAFT && plan.nodes ? CLASSES + index - 1 : index;
}

// The pass's store, choices and top are the host's; materializing is free, because only the length changes.
DEVICE void write_rows(const Text& text, int choice, Pass& pass) {
    int width = text.plan.width;
    core::once([&] {
        pass.width = width;
        pass.num_sequences = 1;
        pass.sequences[0].length = text.materialized;
        pass.sequences[0].first = 0;
        pass.sequences[0].rows = width;
        pass.sequences[0].linear = 1;
    });
    core::each(width, [&](int i) {
        core::Row row = core::row_of(text, i);
        unsigned long long visible = row.visible << row.from | ((1ull << row.from) - 1);
        pass.rows[i] = {visible, row.token, row.position, 0, i, row.head, choice, 0, 0};
    });
}

// adaptive: `body` gets the number of the pass; else whether it is a verify pass. Where nothing is behind the turn, `body` is
// `again`, which is set after it.
extern "C" __global__ void __launch_bounds__(LANES)
    turn(Text* memory, Costs* costs, Course* course, Pass* pass, const Output* outputs, core::Ring* ring,
         cudaGraphConditionalHandle again, cudaGraphConditionalHandle body) {
    __shared__ Desk desk;
    core::Control control = read_control(ring);
#if !ADAPTIVE
    wait_for_previous();
    let_next_start();
#endif
    Text& text = desk.text;
    Words<Text, RECORD> words = fetch<Text, RECORD>(memory);
    Words<Costs> cost_words = fetch(costs);
    Words<Course> course_words = fetch(course);
    Choices choices = fetch_choices(outputs);
    words.put(&text);
    cost_words.put(&desk.costs);
    course_words.put(&desk.course);
    choices.put(desk.chosen);
    __syncwarp();
    unsigned long long time = now();
    if (text.plan.running != core::NOTHING) {
        if (ADAPTIVE) learn(desk.costs, text, time);
        core::absorb(text, desk.costs, core::Market{0.0, 0}, desk.chosen, MAX_WIDTH, desk.kept, desk.history, desk.scratch);
        if (desk.kept.count) core::send(desk.course, desk.kept, *ring);
    }
    int rest = core::rest_of(text, desk.course, control);
    if (rest == core::RUNS) {
        core::plan(text, desk.costs, core::Market{0.0, 0}, MAX_WIDTH, desk.scratch);
        write_rows(text, desk.course.choice, *pass);
    } else {
        core::once([&] { text.plan.running = core::NOTHING; });
    }
    core::once([&] {
        desk.course.rest = rest;
        desk.costs.stamp = rest == core::RUNS ? time : 0;
    });
    set_condition(body, ADAPTIVE ? (rest == core::RUNS ? body_of(text.plan) : NO_BODY) : text.plan.running == core::CHECK);
    fetch<Text, RECORD>(&text).put(memory);
    if (ADAPTIVE) fetch(&desk.costs).put(costs);
    fetch(&desk.course).put(course);
    set_condition(again, rest == core::RUNS);
}
