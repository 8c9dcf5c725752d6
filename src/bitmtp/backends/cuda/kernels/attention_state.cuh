// Softmax over a range of positions, unfinished, and the order in which ranges are put together.
//
// Positions form a tree of radix 4: a piece (64 positions) is a node of depth 0, four nodes of depth d are one of depth d + 1.
// Children are folded in ascending order, always. Blocks may therefore take nodes of any depth, as suits the length of the
// history, and the bits stay the same.
#pragma once

#include "attention_plan.cuh"

#define NOTHING __int_as_float(0xff800000)  // minus infinity: the peak of no score at all

// Of some visible scores of each of ROWS rows: the largest, the sum of e^(score - peak), and N columns of V weighted by it.
template <int ROWS, int N>
struct State {
    float peak[ROWS], sum[ROWS];
    float value[ROWS][N];

    DEVICE void clear() {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            peak[r] = NOTHING, sum[r] = 0;
#pragma unroll
            for (int i = 0; i < N; ++i) value[r][i] = 0;
        }
    }
};

// `from` stands behind `into`. Without a visible position (and so zero throughout) it changes no number.
template <int ROWS, int N>
DEVICE void fold(State<ROWS, N>& into, const State<ROWS, N>& from) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float peak = fmaxf(into.peak[r], from.peak[r]), base = peak == NOTHING ? 0.f : peak;
        float a = exp_(into.peak[r] - base), b = exp_(from.peak[r] - base);
        into.peak[r] = peak;
        into.sum[r] = __fmaf_rn(from.sum[r], b, into.sum[r] * a);
#pragma unroll
        for (int i = 0; i < N; ++i) into.value[r][i] = __fmaf_rn(from.value[r][i], b, into.value[r][i] * a);
    }
}

// The unfinished nodes around the current piece. Rarely touched and indexed at run time: local memory.
template <int ROWS, int N>
struct Tree {
    State<ROWS, N> parts[TOP_DEPTH];  // parts[d]: children of depth d, folded so far
    unsigned filled = 0;              // bit d: parts[d] holds something

    // `node`, of `depth`, is complete and ends at `piece`; what follows begins at piece `next` (-1: nothing does). True if the
    // node of depth `top` is complete now; it is in `node` then.
    DEVICE bool complete(State<ROWS, N>& node, int piece, int next, int depth, int top) {
#pragma unroll 1
        for (; depth < top; ++depth) {
            if (filled >> depth & 1) {
                State<ROWS, N> before = parts[depth];
                fold(before, node);
                node = before;
            }
            filled &= ~(1u << depth);
            if (next < 0 || (piece ^ next) >> 2 * (depth + 1)) continue;
            parts[depth] = node;
            filled |= 1u << depth;
            return false;
        }
        return true;
    }
};
