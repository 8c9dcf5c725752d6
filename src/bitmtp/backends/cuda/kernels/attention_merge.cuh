// From the results of blocks to the results of queries.
//
// A block merges one query. The parts that its K/V head's blocks left are cut into subtrees, one to a half warp, and these
// are put together by the first half warp.
#pragma once

#include "attention_work.cuh"

constexpr int MERGE_TEAMS = 16;
constexpr int MERGE_THREADS = MERGE_TEAMS * 16;
constexpr int PER_LANE = DIMS / 16;  // numbers of a query that a lane has
constexpr int AT_ONCE = PER_LANE > 8 ? 4 : 8;  // parts that a team loads before it folds the first

struct Entry {
    int quad, depth;    // where the part begins, and its depth
    short block, part;  // where it lies
};

// Numbers of one query in a half warp.
struct Query {
    static constexpr int VECTOR = PER_LANE % 4 == 0 && HEAD_SIZE % 4 == 0 ? 4 : PER_LANE % 2 == 0 ? 2 : 1;
    using Columns = State<1, PER_LANE>;

    DEVICE static int dim(int i) { return (i / VECTOR * 16 + threadIdx.x % 16) * VECTOR + i % VECTOR; }

    DEVICE static void load(Columns& state, const float* from) {
        float end[2];
        load_vector(end, from + Workspace::END);
        state.peak[0] = end[0], state.sum[0] = end[1];
#pragma unroll
        for (int i = 0; i < PER_LANE; i += VECTOR) {
            float numbers[VECTOR] = {};
            if (dim(i) < HEAD_SIZE) load_vector(numbers, from + dim(i));
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) state.value[0][i + j] = numbers[j];
        }
    }

    DEVICE static void store(const Columns& state, float* to) {
        if (threadIdx.x % 16 == 0) to[Workspace::END] = state.peak[0], to[Workspace::END + 1] = state.sum[0];
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (dim(i) < HEAD_SIZE) to[dim(i)] = state.value[0][i];
    }
};

struct MergeShared {
    int counts[MERGE_THREADS];
    int depths[MERGE_TEAMS];  // of the results of the teams, 0: none
    int quads[MERGE_TEAMS];   // where they begin
    alignas(16) float results[MERGE_TEAMS][Workspace::STRIDE];
};

// All parts that blocks leave, in order; returns their number.
DEVICE int list_parts(Entry* entries, int (&counts)[MERGE_THREADS], const Nodes& quads, int blocks) {
    const int block = threadIdx.x, last = block < blocks ? share(quads, block + 1, blocks) : 0;
    const int first = block < blocks ? share(quads, block, blocks) : 0;
    int count = 0;
#pragma unroll 1
    for (int at = first; at < last; at += Part(quads, at, last).count) ++count;
    counts[block] = count;
    __syncthreads();
    int place = 0, total = 0;
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
        if (i == block) place = total;
        total += counts[i];
    }
    short number = 0;
#pragma unroll 1
    for (int at = first; at < last;) {
        const Part part(quads, at, last);
        entries[place + number] = {quads.node(at), part.depth, (short)block, number};
        at += part.count, ++number;
    }
    __syncthreads();
    return total;
}

// The entries in node `number`, of those listed, of a greater depth.
struct Slice {
    int first, last;

    DEVICE Slice(const Entry* entries, int total, const Nodes& nodes, int number) : first(0), last(0) {
#pragma unroll 1
        for (int i = threadIdx.x % 16; i < total; i += 16) {
            const int above = nodes.listed(entries[i].quad >> 2 * (nodes.depth - 1));
            first += above < number, last += above <= number;
        }
#pragma unroll
        for (int mask = 8; mask > 0; mask >>= 1) {
            first += __shfl_xor_sync(ALL_LANES, first, mask);
            last += __shfl_xor_sync(ALL_LANES, last, mask);
        }
    }
};

// A subtree's parts, AT_ONCE on their way at a time. True if there are any; `result` then has the depth that is returned.
DEVICE int merge_parts(Query::Columns& result, const Entry* entries, const Slice& slice, const Workspace& work, int head,
                       int query, int depth) {
    Tree<1, PER_LANE> tree;
    int found = 0;
#pragma unroll 1
    for (int from = slice.first; from < slice.last; from += AT_ONCE) {
        Query::Columns parts[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const Entry entry = entries[min(from + i, slice.last - 1)];
            Query::load(parts[i], work.at(head, entry.block, entry.part, query));
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (from + i >= slice.last) break;
            const Entry entry = entries[from + i];
            const int next = from + i + 1 < slice.last ? entries[from + i + 1].quad * QUAD : -1;
            found = max(depth, entry.depth);
            if (tree.complete(parts[i], entry.quad * QUAD, next, entry.depth, found)) result = parts[i];
        }
    }
    return found;
}

// The results of all teams.
DEVICE void merge_teams(Query::Columns& result, const MergeShared& shared, int teams) {
    Tree<1, PER_LANE> tree;
#pragma unroll 1
    for (int team = 0; team < teams;) {
        int next = team + 1;
        while (next < teams && !shared.depths[next]) ++next;
        Query::load(result, shared.results[team]);
        tree.complete(result, shared.quads[team] * QUAD, next < teams ? shared.quads[next] * QUAD : -1, shared.depths[team],
                      TOP_DEPTH);
        team = next;
    }
}

// Results of one query, and what the next kernel's norm and quantisation want to know of them.
DEVICE void write_result(const Query::Columns& state, int row, int head, const float* gain, float* attended, float2* stats) {
    float squares = 0, largest = 0, inverse = __frcp_rn(state.sum[0]);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int d = Query::dim(i), column = head * HEAD_SIZE + d;
        if (d >= HEAD_SIZE) continue;
        float x = state.value[0][i] * inverse;
        if (threadIdx.x < 16) attended[row * OUT_STRIDE + column] = x;
        squares = __fmaf_rn(x, x, squares), largest = fmaxf(largest, fabsf(gain ? x * gain[column] : x));
    }
#pragma unroll
    for (int mask = 8; mask > 0; mask >>= 1) {
        squares += __shfl_xor_sync(ALL_LANES, squares, mask);
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, mask));
    }
    if (threadIdx.x == 0) stats[row * NUM_HEADS + head] = make_float2(squares, largest);
}
