// Attention of one layer: q, k and v of the pass, its K/V into the store, softmax over history and pass, all heads.
//
// Constants: NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE (even); KV_BYTES of a number in the store, 2 or 4; QK_NORM,
// NORM_EPS; SCALE of scores; MAX_ROWS of a pass; ONE_SEQUENCE: passes have no second one; STAGES: pieces on their way at a
// time; QKV_STRIDE, OUT_STRIDE of a row in qkv and attended; SHARED_BYTES: what the launch gives.
//
// Grid: blocks that share the history x NUM_KV_HEADS x items (attention_plan.cuh). A block computes nodes of the history, each
// by itself, for the query heads of one K/V head; the last of them to end puts the nodes together (attention_state.cuh: in an
// order that no launch changes). All that is loaded before `wait_for_previous` is older than the kernel before this one: that
// kernel has waited for those before it before it let this one start.
//
// Code that runs once comes from memory far away, so loops here stay rolled where nothing is gained by unrolling.
#include "attention_merge.cuh"
#include "attention_rows.cuh"

// The part of a piece that is history, into a tile. A thread keeps to its column of 16 bytes.
DEVICE void load_piece(Tile (&tile)[2], const Item& item, int layer, int piece) {
    const int count = min(PIECE, item.sequence.length - piece * PIECE);
    const Number* keys = (const Number*)(item.sequence.store + Layout::tile(piece, layer, 0, blockIdx.y));
    const Number* values = (const Number*)(item.sequence.store + Layout::tile(piece, layer, 1, blockIdx.y));
    if constexpr (HEAD_SIZE % CHUNK == 0) {
        constexpr int CHUNKS = HEAD_SIZE / CHUNK, ROWS = THREADS / CHUNKS;  // rows at a time
        const int row = threadIdx.x / CHUNKS, column = threadIdx.x % CHUNKS * CHUNK;
        const int from = row * HEAD_SIZE + column;
        if (row >= ROWS) return;
#pragma unroll
        for (int n = 0; n < PIECE; n += ROWS) {
            if (row + n >= count) continue;
            copy_async(&tile[0][Vectors::at(row + n, column)], keys + from + n * HEAD_SIZE);
            copy_async(&tile[1][Vectors::at(row + n, column)], values + from + n * HEAD_SIZE);
        }
    } else {
        for (int i = threadIdx.x; i < count * HEAD_SIZE; i += THREADS) {
            int to = Vectors::at(i / HEAD_SIZE, i % HEAD_SIZE);
            tile[0][to] = keys[i], tile[1][to] = values[i];
        }
    }
}

// q of the item's rows, and, in a block that reads the pass itself, k and v of the sequence's; one block stores them.
struct Preparation {
    const Heads& heads;
    const Item& item;
    int layer, queries, total;
    bool store;

    DEVICE void locate(int task, Kind& kind, int& row, int& head) const {
        if (task < queries) {
            kind = QUERY, row = item.index + task / RATIO, head = blockIdx.y * RATIO + task % RATIO;
        } else {
            kind = (task - queries) % 2 ? VALUE : KEY, row = (task - queries) / 2;
            head = NUM_HEADS + (kind == VALUE ? NUM_KV_HEADS : 0) + blockIdx.y;
        }
    }

    DEVICE void load(Vector& vector, const Shared& shared, int task) const {
        Kind kind;
        int row, head;
        locate(task, kind, row, head);
        vector.load(heads, kind, item.first - item.index + row, head, shared.positions[row]);
    }

    DEVICE void finish(Vector& vector, Shared& shared, int task, bool wanted) const {
        Kind kind;
        int row, head;
        locate(task, kind, row, head);
        vector.finish(kind);
        if (!wanted) return;
        if (kind == QUERY) return vector.store(shared.queries, task);
        vector.store(shared.fresh[kind == VALUE], row);
        long long slot = Layout::slot(item.sequence.length + row, layer, kind == VALUE, blockIdx.y);
        if (store) vector.store((Number*)(item.sequence.store + slot));
    }

    // A half warp takes two vectors at a time.
    DEVICE void run(Shared& shared) const {
        constexpr int TEAMS = THREADS / 16;
#pragma unroll 1
        for (int task = threadIdx.x / 16; task - int(threadIdx.x % 32 / 16) < total; task += 2 * TEAMS) {
            Vector vectors[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) load(vectors[i], shared, min(task + i * TEAMS, total - 1));
#pragma unroll
            for (int i = 0; i < 2; ++i) finish(vectors[i], shared, min(task + i * TEAMS, total - 1), task + i * TEAMS < total);
        }
    }
};

// K and V of the pass to their positions in a tile, zeros where there is none. `row`, if it is not -1: only what it sees.
DEVICE void insert_pass(Tile (&tile)[2], const Shared& shared, const Item& item, int piece, int row) {
    int place = threadIdx.x / 4, behind = piece * PIECE + place - item.sequence.length;
    if (behind < 0) return;
    int source = -1;
    if (row < 0 && behind < item.sequence.rows) source = behind;
    for (int i = 0; row >= 0 && i < item.sequence.rows; ++i)
        if (shared.visible[row] >> i & 1 && shared.positions[i] - item.sequence.length == behind) source = i;
#pragma unroll
    for (int value = 0; value < 2; ++value)
        for (int i = threadIdx.x % 4 * CHUNK; i < DIMS; i += 4 * CHUNK) {
            uint4 numbers = {0, 0, 0, 0};
            if (source >= 0) numbers = *(const uint4*)&shared.fresh[value][Vectors::at(source, i)];
            *(uint4*)&tile[value][Vectors::at(place, i)] = numbers;
        }
}

// What a row of the item sees; in a tree its bits name rows, which stand anywhere behind the history.
DEVICE Sight find_sight(const Pass* pass, const Shared& shared, const Item& item, int index) {
    const Row& row = pass->rows[item.first + index];
    Sight sight = {row.visible, row.sinks, row.recent ? row.position - row.recent + 1 : 0};
    if (item.sequence.linear) return sight;
    sight.bits = 0;
#pragma unroll 1
    for (int i = 0; i < item.sequence.rows; ++i) {
        int behind = shared.positions[i] - item.sequence.length;
        if (row.visible >> i & 1 && behind >= 0 && behind < 64) sight.bits |= 1ull << behind;
    }
    return sight;
}

// Takes from the scores of a thread's two queries what they do not see; `turn`, if it is not -1, is the only row that sees.
DEVICE void hide(float (&c)[KEY_TILES][4], const Shared& shared, const Item& item, int query, int position, int turn) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int row = min((query + i * 8) / RATIO, item.count - 1);
        Sight sight = shared.sights[row];
#pragma unroll
        for (int t = 0; t < KEY_TILES * 2; ++t) {
            bool seen = sight.sees(position + t / 2 * 8 + t % 2, item.sequence.length) && (turn < 0 || row == turn);
            if (!seen) c[t / 2][i * 2 + t % 2] = NOTHING;
        }
    }
}

// Softmax weights of a piece, rounded, to shared memory, from the scores of its warps.
DEVICE void weigh_scores(Shared& shared, const float (&c)[KEY_TILES][4], int query, int member, float (&peak)[2]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        peak[i] = NOTHING;
#pragma unroll
        for (int t = 0; t < KEY_TILES; ++t) peak[i] = fmaxf(peak[i], fmaxf(c[t][i * 2], c[t][i * 2 + 1]));
        peak[i] = fmaxf(peak[i], __shfl_xor_sync(ALL_LANES, peak[i], 1));
        peak[i] = fmaxf(peak[i], __shfl_xor_sync(ALL_LANES, peak[i], 2));
        if (lane % 4 == 0) shared.peaks[(query + i * 8) * TEAM + member] = peak[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float4* peaks = (const float4*)&shared.peaks[(query + i * 8) * TEAM];
#pragma unroll
        for (int w = 0; w < TEAM / 4; ++w) {
            float4 p = peaks[w];
            peak[i] = fmaxf(fmaxf(fmaxf(p.x, p.y), fmaxf(p.z, p.w)), peak[i]);
        }
        float base = peak[i] == NOTHING ? 0.f : peak[i];
#pragma unroll
        for (int t = 0; t < KEY_TILES; ++t)
            store_pair(&shared.weights[Weights::at(query + i * 8, (member * KEY_TILES + t) * 8 + lane % 4 * 2)],
                       exp_(c[t][i * 2] - base), exp_(c[t][i * 2 + 1] - base));
    }
    __syncthreads();
}

// One piece for all queries of the block: scores, softmax within the piece, weighted V.
DEVICE void attend_piece(Shared& shared, const Tile (&tile)[2], const Item& item, int piece, int turn,
                         bool all_seen, Columns& state) {
    int lane = threadIdx.x % 32, member = threadIdx.x / 32 % TEAM, group = threadIdx.x / 32 / TEAM * 16;
    int query = group + lane / 4, column = member * VALUE_TILES * 8;
    bool active = group < item.count * RATIO;
    float c[KEY_TILES][4] = {}, o[VALUE_TILES][4] = {}, sums[4] = {};
    if (active) scores(c, &shared.queries[group * Vectors::STRIDE], &tile[0][member * KEY_TILES * 8 * Vectors::STRIDE]);
    if (!all_seen) hide(c, shared, item, query, piece * PIECE + member * KEY_TILES * 8 + lane % 4 * 2, turn);
    weigh_scores(shared, c, query, member, state.peak);
    if (active && column < DIMS) weigh(o, sums, &shared.weights[group * Weights::STRIDE], tile[1], column);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        state.sum[i] = sums[i * 2];
#pragma unroll
        for (int t = 0; t < VALUE_TILES * 2; ++t) state.value[i][t] = o[t / 2][i * 2 + t % 2];
    }
}

// True in the block that ends last of those that share a history.
DEVICE bool ends_last(const Workspace& work, Shared& shared, const Plan& plan) {
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned* counter = &work.counters[blockIdx.y * MAX_WIDTH + blockIdx.z];
        shared.last = count_arrival(counter) + 1 == (plan.nodes + plan.each - 1) / plan.each;
        if (shared.last) *counter = 0;
    }
    __syncthreads();
    const bool last = shared.last;
    __syncthreads();  // what follows uses all of the shared memory for something else
    return last;
}

// The block's nodes, one after the other, pieces loaded STAGES ahead.
DEVICE void attend(Shared& shared, const Workspace& work, const Plan& plan, const Item& item, int layer, Cursor at,
                   Cursor ahead) {
    Tree<2, 2 * VALUE_TILES> tree;
    Columns quad, piece;
    quad.clear();
#pragma unroll 1
    for (int stage = 0; at.valid(); stage = (stage + 1) % STAGES) {
        wait_copies<STAGES - 1>();
        __syncthreads();
        auto& tile = shared.tiles[stage];
        const bool overlaps = (at.piece + 1) * PIECE > item.sequence.length, turns = overlaps && !item.sequence.linear;
#pragma unroll 1
        for (int turn = turns ? 0 : -1; turn < (turns ? item.count : 0); ++turn) {
            if (overlaps) {
                insert_pass(tile, shared, item, at.piece, turn);
                __syncthreads();
            }
            attend_piece(shared, tile, item, at.piece, turn, !overlaps && !plan.windowed, piece);
            fold(quad, piece);
            __syncthreads();
        }
        if (ahead.valid()) load_piece(tile, item, layer, ahead.piece), ahead.next(plan);
        close_copies();
        const int before = at.piece, node = at.index;
        const bool left = at.next(plan);
        if (!left && before >> 2 == at.piece >> 2) continue;
        if (tree.complete(quad, before, left ? -1 : at.piece, 1, plan.depth)) write_node(work, item, node, quad);
        quad.clear();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
attention(const Pass* pass, int layer, const float* qkv, const float* q_norm, const float* k_norm, const float* cosines,
          const float* sines, const float* gain, float* attended, float2* stats, char* workspace) {
    extern __shared__ uint4 memory[];
    Shared& shared = *(Shared*)memory;
    const Item item = find_item<ITEM_ROWS, ONE_SEQUENCE>(pass, blockIdx.z);
    if (item.count <= 0) return wait_for_previous();
    const Plan plan = make_plan(pass, item, gridDim.x);
    const int from = blockIdx.x * plan.each, to = min(from + plan.each, plan.nodes);
    if (from >= to) return wait_for_previous();

    if constexpr (DIMS != HEAD_SIZE) {
        for (int i = threadIdx.x; i < SHARED_BYTES / 16; i += THREADS) memory[i] = {0, 0, 0, 0};
        __syncthreads();
    }
    Cursor ahead(plan, from, to);
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) {
        if (ahead.valid()) load_piece(shared.tiles[stage], item, layer, ahead.piece), ahead.next(plan);
        close_copies();
    }
    for (int i = threadIdx.x; i < item.sequence.rows; i += THREADS)
        shared.positions[i] = pass->rows[item.sequence.first + i].position;
    __syncthreads();
    if (threadIdx.x < item.count) {
        shared.visible[threadIdx.x] = pass->rows[item.first + threadIdx.x].visible;
        shared.sights[threadIdx.x] = find_sight(pass, shared, item, threadIdx.x);
    }
    const int own = item.sequence.length / PIECE, queries = item.count * RATIO;
    const bool reads_pass = plan.stop(to - 1) > own;
    const bool stores = item.index == 0 && plan.listed(own) >= from && plan.listed(own) < to;
    const Heads heads = {qkv, q_norm, k_norm, cosines, sines};

    wait_for_previous();
    let_next_start();
    Preparation{heads, item, layer, queries, queries + (reads_pass ? item.sequence.rows * 2 : 0), stores}.run(shared);
    const Workspace work(workspace);
    attend(shared, work, plan, item, layer, Cursor(plan, from, to), ahead);
    if (!ends_last(work, shared, plan)) return;
#pragma unroll 1
    for (int first = 0; first < queries; first += 16) {
        Merge merge = {work, plan, (float*)memory, item.first * RATIO + first, min(16, queries - first)};
        const int query = first + merge.own();
        write_result(merge.run(), item.first + query / RATIO, blockIdx.y * RATIO + query % RATIO, gain, attended, stats,
                     threadIdx.x / 16 < merge.queries);
    }
}

// Rows from[0 ... count - 1] (by number, behind the history) of a sequence to the slots right behind its history, in this
// order. Grid: NUM_LAYERS x 2 x NUM_KV_HEADS. All is read before anything is written, so the ranges may overlap.
extern "C" __global__ void __launch_bounds__(THREADS)
move_rows(char* store, int length, const int* from, int count) {
    constexpr int WORDS = HEAD_SIZE * KV_BYTES / 4;
    constexpr int EACH = (MAX_WIDTH * WORDS + THREADS - 1) / THREADS;
    const auto slot = [&](int i) { return (unsigned*)(store + Layout::slot(i, blockIdx.x, blockIdx.y, blockIdx.z)); };
    unsigned words[EACH];
    wait_for_previous();
    let_next_start();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int n = i * THREADS + threadIdx.x, row = n / WORDS;
        if (row >= count) continue;
        words[i] = slot(length + from[row])[n % WORDS];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int n = i * THREADS + threadIdx.x, row = n / WORDS;
        if (row < count) slot(length + row)[n % WORDS] = words[i];
    }
}
