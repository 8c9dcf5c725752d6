// Through which a loop's tokens come to the host, and what the host says to it.
#pragma once

#include "absorb.hpp"

namespace core {

constexpr unsigned RING_SIZE = 4096;  // a power of two: positions wrap with their counter

// Pinned host memory. An entry carries its own number, and 8 bytes arrive as one: no fence and no second counter.
struct alignas(64) Ring {
    unsigned received;  // the host's: entries it has taken
    int stop;           // the host's: not 0 to interrupt
    int reserved[14];   // what the GPU writes lies on other cache lines
    u64 entries[RING_SIZE];
};

// The host's half of the ring, read as one.
struct Control {
    unsigned received;
    int stop;
};

// Why a loop rests. PAUSED: the host asked for it; NEEDS_MEMORY: the next pass may reach beyond `capacity`; RING_FULL: the host
// has to take entries out first.
enum Rest : int { RUNS = 0, ENDED = 1, PAUSED = 2, NEEDS_MEMORY = 3, RING_FULL = 4 };

// How a loop stands with the host; read and written by it as four whole numbers.
struct alignas(16) Course {
    int rest, capacity;  // positions that K/V memory is mapped for and the captured passes reach
    unsigned sent;       // entries ever written to the ring
    int choice;          // of every row: index into the pass's choices, or -1: greedy
};

constexpr int ITERATION = 3;  // in the place of a source: what an iteration counted, behind its tokens

// Token in bits 0-31, source in 32-33, and above them its number plus 1 (an empty ring is zero, one lap ago is another).
CORE u64 entry(unsigned token, int source, unsigned number) { return u64(number + 1) << 34 | u64(source) << 32 | token; }

CORE unsigned counts_of(const Kept& kept) {
    return kept.passes | kept.drafted << 4 | kept.copied << 5 | kept.proposed << 8;
}

CORE void send(Course& course, const Kept& kept, Ring& ring) {
    unsigned first = course.sent;
    each(kept.count + 1, [&](int i) {
        bool last = i == kept.count;
        volatile u64* place = &ring.entries[(first + i) % RING_SIZE];
        *place = entry(last ? counts_of(kept) : unsigned(kept.tokens[i]), last ? ITERATION : kept.sources[i], first + i);
    });
    once([&] { course.sent = first + kept.count + 1; });
}

// Whether the next pass may run. No row of it stands further than a block or a copy behind the text.
CORE int rest_of(const Text& text, const Course& course, Control control) {
    if (text.status != GOES_ON) return ENDED;
    if (text.drafted) return RUNS;  // an iteration is finished first
    if (control.stop) return PAUSED;
    int reach = least(MAX_NODES, room(text));
    if (text.committed + reach > course.capacity) return NEEDS_MEMORY;
    return course.sent - control.received + MAX_NODES + 2 > RING_SIZE ? RING_FULL : RUNS;
}

}  // namespace core
