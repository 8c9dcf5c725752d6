// From the results of blocks to the results of queries.
#pragma once

#include "attention_work.cuh"

// A finished node of the block's queries, from the fragments of its threads.
DEVICE void write_node(const Workspace& work, const Item& item, int node, const Columns& state) {
    int lane = threadIdx.x % 32, member = threadIdx.x / 32 % TEAM;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int query = threadIdx.x / 32 / TEAM * 16 + lane / 4 + i * 8;
        if (query >= item.count * RATIO) continue;
        float* to = work.at(node, item.first * RATIO + query);
        if (member == 0 && lane % 4 == 0) *(float2*)(to + Workspace::END) = make_float2(state.peak[i], state.sum[i]);
#pragma unroll
        for (int t = 0; t < VALUE_TILES; ++t) {
            int d = (member * VALUE_TILES + t) * 8 + lane % 4 * 2;
            if (d < HEAD_SIZE) *(float2*)(to + d) = make_float2(state.value[i][t * 2], state.value[i][t * 2 + 1]);
        }
    }
}

// All nodes of up to 16 queries, one to a half warp. The results come to shared memory, as many as fit at a time.
struct Merge {
    static constexpr int PER_LANE = DIMS / 16;
    static constexpr int VECTOR = PER_LANE % 4 == 0 && HEAD_SIZE % 4 == 0 ? 4 : PER_LANE % 2 == 0 ? 2 : 1;
    static constexpr int VECTORS = PER_LANE / VECTOR;
    using Columns = State<1, PER_LANE>;

    const Workspace& work;
    const Plan& plan;
    float* memory;  // SHARED_BYTES
    int first;      // query of the pass
    int queries;
    Tree<1, PER_LANE> tree;
    Columns parent;

    DEVICE static int dim(int vector) { return (vector * 16 + threadIdx.x % 16) * VECTOR; }
    DEVICE int own() const { return min(int(threadIdx.x) / 16, queries - 1); }

    DEVICE void copy(int from, int to) {
        const int words = queries * Workspace::STRIDE / 4;  // of 16 bytes, of a node
#pragma unroll 1
        for (int node = from; node < to; ++node)
#pragma unroll 1
            for (int i = threadIdx.x; i < words; i += THREADS)
                copy_async(memory + ((node - from) * words + i) * 4, work.at(node, first) + i * 4);
        close_copies();
        wait_copies<0>();
        __syncthreads();
    }

    // The child is `from` in shared memory; what is not wanted counts as empty.
    DEVICE void add(const float* from, bool wanted) {
        Columns child;
        child.peak[0] = wanted ? from[Workspace::END] : NOTHING, child.sum[0] = from[Workspace::END + 1];
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            int d = dim(i / VECTOR) + i % VECTOR;
            child.value[0][i] = d < HEAD_SIZE ? from[d] : 0;
        }
        fold(parent, child);
    }

    DEVICE int parent_of(int listed) const { return plan.node(listed) >> 2; }

    // Listed nodes [from, to), up to four of one parent at a time.
    DEVICE void fold_nodes(int from, int to) {
#pragma unroll 1
        for (int listed = from; listed < to;) {
            int above = parent_of(listed), count = 1;
#pragma unroll
            for (int n = 1; n < 4; ++n) count += listed + n < to && parent_of(listed + n) == above;
#pragma unroll
            for (int n = 0; n < 4; ++n)
                add(memory + ((listed - from + min(n, count - 1)) * queries + own()) * Workspace::STRIDE, n < count);
            listed += count;
            bool more = listed < plan.nodes;
            if (more && parent_of(listed) == above) continue;
            const int unit = 2 * plan.depth + 2;
            tree.complete(parent, above << unit, more ? parent_of(listed) << unit : -1, plan.depth + 1, TOP_DEPTH);
            if (more) parent.clear();
        }
    }

    DEVICE const Columns& run() {
        const int room = SHARED_BYTES / (queries * Workspace::STRIDE * 4);
        parent.clear();
#pragma unroll 1
        for (int from = 0; from < plan.nodes; from += room) {
            int to = min(from + room, plan.nodes);
            copy(from, to);
            fold_nodes(from, to);
            __syncthreads();
        }
        return parent;
    }
};

// Results of one query, and what the next kernel's norm and quantisation want to know of them.
DEVICE void write_result(const Merge::Columns& state, int row, int head, const float* gain, float* attended, float2* stats,
                         bool wanted) {
    float squares = 0, largest = 0, inverse = __frcp_rn(state.sum[0]);
#pragma unroll
    for (int i = 0; i < Merge::PER_LANE; ++i) {
        int d = Merge::dim(i / Merge::VECTOR) + i % Merge::VECTOR, column = head * HEAD_SIZE + d;
        if (d >= HEAD_SIZE || !wanted) continue;
        float x = state.value[0][i] * inverse;
        attended[row * OUT_STRIDE + column] = x;
        squares = __fmaf_rn(x, x, squares), largest = fmaxf(largest, fabsf(gain ? x * gain[column] : x));
    }
#pragma unroll
    for (int mask = 8; mask > 0; mask >>= 1) {
        squares += __shfl_xor_sync(ALL_LANES, squares, mask);
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, mask));
    }
    if (wanted && threadIdx.x % 16 == 0) stats[row * NUM_HEADS + head] = make_float2(squares, largest);
}
