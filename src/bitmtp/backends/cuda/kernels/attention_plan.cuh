// Who does what: rows of a block, pieces of a block, and what a row sees.
#pragma once

#include "common.cuh"

constexpr int MAX_DEPTH = 3;  // of the nodes that a block takes
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

// The pieces in which some row of an item sees a position, [0, sinks) and [recent, end), cut into nodes of 4^depth pieces.
struct Plan {
    int sinks, recent, end;
    int depth;
    bool windowed;            // some row does not see all of the history
    int sink_nodes, skipped;  // listed node i is node i of the tree, and node i + skipped from sink_nodes on
    int nodes;                // in the list
    int each;                 // of them in one block

    DEVICE int node(int i) const { return i < sink_nodes ? i : i + skipped; }
    DEVICE int listed(int piece) const {
        int node = piece >> 2 * depth;
        return node < sink_nodes ? node : node - skipped;
    }
    DEVICE int begin(int i) const { return enter(node(i) << 2 * depth); }
    DEVICE int stop(int i) const { return min(end, (node(i) + 1) << 2 * depth); }
    DEVICE int enter(int piece) const { return piece >= sinks && piece < recent ? recent : piece; }
};

// All lanes of a warp; `blocks` share the pieces. Small nodes, but not many more than there are blocks: putting
// them together is the work of one.
DEVICE Plan make_plan(const Pass* pass, const Item& item, int blocks) {
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
    for (plan.depth = 0;; ++plan.depth) {
        int round = (1 << 2 * plan.depth) - 1;
        plan.sink_nodes = (plan.sinks + round) >> 2 * plan.depth;
        plan.skipped = max(0, (plan.recent >> 2 * plan.depth) - plan.sink_nodes);
        plan.nodes = ((plan.end + round) >> 2 * plan.depth) - plan.skipped;
        if (plan.nodes <= (plan.depth ? blocks + blocks / 2 : blocks) || plan.depth == MAX_DEPTH) break;
    }
    plan.each = (plan.nodes + blocks - 1) / blocks;
    return plan;
}

// Walks through the pieces of the listed nodes [index, last).
struct Cursor {
    int index, last, piece;

    DEVICE Cursor(const Plan& plan, int from, int to) : index(from), last(to), piece(plan.begin(from)) {}
    DEVICE bool valid() const { return index < last; }

    // True if it left a node.
    DEVICE bool next(const Plan& plan) {
        piece = plan.enter(piece + 1);
        if (piece < plan.stop(index)) return false;
        if (++index < last) piece = plan.begin(index);
        return true;
    }
};
