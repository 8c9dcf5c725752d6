// Who does what: rows of a block, pieces of a block, and what a row sees.
#pragma once

#include "common.cuh"

constexpr int QUAD = 4;        // pieces of a node of depth 1: what blocks share out
constexpr int TOP_DEPTH = 10;  // of a node that holds every position there can be
constexpr unsigned ALL_LANES = 0xffffffffu;

// Rows of one sequence that share a block; count 0: there is nothing to do.
struct Item {
    Sequence sequence;
    int first;  // row of the pass
    int index;  // its number within the sequence
    int count;
};

// With one sequence, block z takes the z-th GROUP_ROWS rows; otherwise the rows from z on, if they begin such a group.
template <int GROUP_ROWS, bool ALONE>
DEVICE Item find_item(const Pass* pass, int z) {
    Item item;
    item.first = ALONE ? z * GROUP_ROWS : z;
    int width = pass->width;
    Row row = pass->rows[item.first];
    item.index = ALONE ? item.first : row.index;
    item.count = 0;
    if (item.first >= width || item.index % GROUP_ROWS) return item;
    item.sequence = pass->sequences[ALONE ? 0 : row.sequence];
    item.count = min(GROUP_ROWS, item.sequence.rows - item.index);
    return item;
}

// Positions that a row sees: of the history those before `sinks` and those from `recent` on, behind it those whose bit is set.
struct Sight {
    unsigned long long bits;
    int sinks, recent;

    DEVICE bool sees(int position, int length) const {
        int behind = position - length;
        if (behind < 0) return position < sinks || position >= recent;
        return behind < 64 && (bits >> behind & 1);
    }
};

// The nodes of one depth in which some row of an item sees a position, in order.
struct Nodes {
    int depth;
    int sinks, skipped;  // listed node i is node i of the tree, and node i + skipped from `sinks` on
    int count;           // in the list

    DEVICE int node(int listed) const { return listed < sinks ? listed : listed + skipped; }
    DEVICE int listed(int node) const { return node < sinks ? node : node - skipped; }
};

// The pieces in which some row of an item sees a position: [0, sinks) and [recent, end).
struct Plan {
    int sinks, recent, end;
    bool windowed;  // some row does not see all of the history

    DEVICE bool holds(int piece) const { return piece < end && (piece < sinks || piece >= recent); }

    DEVICE Nodes nodes(int depth) const {
        const int shift = 2 * depth, round = (1 << shift) - 1;
        Nodes nodes;
        nodes.depth = depth;
        nodes.sinks = (sinks + round) >> shift;
        nodes.skipped = max(0, (recent >> shift) - nodes.sinks);
        nodes.count = ((end + round) >> shift) - nodes.skipped;
        return nodes;
    }
};

// All lanes of a warp.
DEVICE Plan make_plan(const Pass* pass, const Item& item) {
    int lane = threadIdx.x % 32, length = item.sequence.length;
    Row row = pass->rows[item.first + min(lane, item.count - 1)];
    bool all = __any_sync(ALL_LANES, row.recent == 0);
    int sinks = __reduce_max_sync(ALL_LANES, row.sinks);
    int recent = __reduce_min_sync(ALL_LANES, row.position - row.recent + 1);
    Plan plan;
    plan.windowed = __any_sync(ALL_LANES, row.recent != 0);
    plan.end = __reduce_max_sync(ALL_LANES, row.position) / PIECE + 1;
    plan.recent = all ? 0 : min(max(recent, 0), length) / PIECE;
    plan.sinks = all ? 0 : min((min(sinks, length) + PIECE - 1) / PIECE, plan.recent);
    return plan;
}

// The first of the listed quads of block `index` of `blocks`.
DEVICE int share(const Nodes& quads, int index, int blocks) { return quads.count * index / blocks; }

// A node that one block computes: the largest that begins with listed quad `first` and ends before `last`. At the end of the
// list it may be as large as it likes.
struct Part {
    int first, count;  // listed quads
    int depth;

    DEVICE Part(const Nodes& quads, int begin, int last) : first(begin), depth(1) {
        const int stop = first < quads.sinks && quads.skipped ? min(last, quads.sinks) : last;
        int size = 1;
        for (; depth < TOP_DEPTH && quads.node(first) % (4 * size) == 0; ++depth, size *= 4)
            if (stop < quads.count && first + 4 * size > stop) break;
        count = min(size, stop - first);
    }
};
