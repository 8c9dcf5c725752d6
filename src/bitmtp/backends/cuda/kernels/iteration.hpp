// The resident loop's decisions on a device: rows go into its Pass, tokens into a ring that the host reads. Plain C++ and CUDA,
// as decisions.hpp is.
#pragma once

#include "decisions.hpp"
#include "pass.cuh"

namespace decisions {

static_assert(MAX_ROWS == MAX_WIDTH);

constexpr unsigned RING_SIZE = 4096;  // a power of two: positions wrap with their counter

// Pinned host memory. An entry carries its own number, and 8 bytes arrive as one: no fence and no second counter.
struct alignas(64) Ring {
    unsigned received;  // the host's: tokens it has taken
    int stop;           // the host's: not 0 to interrupt
    int reserved[14];   // what the GPU writes lies on other cache lines
    unsigned long long entries[RING_SIZE];
};

// The host's half of the ring, read as one.
struct Control {
    unsigned received;
    int stop;
};

// Rows

TWIN Row row_of(const Loop& loop, int i, Planned planned) {
    int head = planned.heard ? HEAD_EXACT : HEAD_NONE;
    return {planned.visible, planned.token, planned.position, 0, i, head, loop.choice, 0, 0};
}

// The pass's store, choices and top are the host's; materializing is free, because only the length changes.
TWIN void set_shape(const Loop& loop, Pass& pass, int width) {
    once([&] {
        pass.width = width;
        pass.num_sequences = 1;
        pass.sequences[0].length = loop.materialized;
        pass.sequences[0].first = 0;
        pass.sequences[0].rows = width;
        pass.sequences[0].linear = 1;
    });
}

TWIN void plan_draft(const Loop& loop, Pass& pass) {
    int width = draft_width(loop);
    set_shape(loop, pass, width);
    each(width, [&](int i) { pass.rows[i] = row_of(loop, i, draft_row(loop, i)); });
}

TWIN void plan_verify(const Loop& loop, Pass& pass) {
    set_shape(loop, pass, loop.num_proposals);
    each(loop.num_proposals, [&](int i) { pass.rows[i] = row_of(loop, i, verify_row(loop, i)); });
}

// The ring

// Token in bits 0-31, source in 32-33, and above them its number plus 1 (an empty ring is zero, one lap ago is another).
TWIN unsigned long long entry(int token, int source, unsigned number) {
    return (unsigned long long)(number + 1) << 34 | (unsigned long long)source << 32 | (unsigned)token;
}

TWIN void send(Loop& loop, const Kept& kept, Ring& ring) {
    unsigned first = loop.sent;
    each(kept.count, [&](int i) {
        volatile unsigned long long* place = &ring.entries[(first + i) % RING_SIZE];
        *place = entry(kept.tokens[i], kept.sources[i], first + i);
    });
    once([&] { loop.sent = first + kept.count; });
}

// Why the next iteration must not begin now; RUNNING if it may. No row of it stands further than `reach` behind the text,
// and it commits at most one token more.
TWIN int status_of(const Loop& loop, Control control, int reach) {
    if (ended(loop) != RUNNING) return ended(loop);
    if (control.stop) return INTERRUPTED;
    if (loop.committed + reach > loop.capacity) return NEEDS_MEMORY;
    unsigned waiting = loop.sent - control.received;
    return waiting + reach + 1 > RING_SIZE ? RING_FULL : RUNNING;
}

// The loop around them

// At an iteration's boundary: plan the next draft, if there is to be one.
TWIN void advance(Loop& loop, Pass& pass, Control control) {
    // The verifier may run as many rows behind the whole text as there are proposals.
    int status = status_of(loop, control, block(loop));
    once([&] { loop.status = status; });
    if (status == RUNNING) plan_draft(loop, pass);
}

// After a draft pass. True: the pass to run next is a verify pass.
TWIN bool after_draft(Loop& loop, Pass& pass, const Chosen* outputs, Kept& kept, Ring& ring, Control control) {
    judge(loop, outputs, kept);
    if (loop.num_proposals) {
        plan_verify(loop, pass);
        return true;
    }
    send(loop, kept, ring);
    advance(loop, pass, control);
    return false;
}

TWIN void after_verify(Loop& loop, Pass& pass, const Chosen* outputs, Kept& kept, Ring& ring, Control control) {
    accept(loop, outputs, kept, 1);
    send(loop, kept, ring);
    advance(loop, pass, control);
}

}  // namespace decisions
