// Attention of one layer: q, k and v of the pass, its K/V into the store, softmax over history and pass, all heads.
//
// Constants: NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE (even); KV_BYTES of a number in the store, 2 or 4; QK_NORM,
// NORM_EPS; SCALE of scores; MAX_ROWS of a pass; ONE_SEQUENCE: passes have no second one; STEP_PIECES of a quad at a time,
// their K one of STAGES stages and their V the next; QKV_STRIDE, OUT_STRIDE of a row in qkv and attended; SHARED_BYTES: what
// the launch gives.
//
// `attention`, grid: blocks that share the history x NUM_KV_HEADS x items (attention_plan.cuh). A block computes a range of
// the history's quads for the query heads of one K/V head, and leaves results of the few nodes that make up the range.
// `attention_merge` puts those together (attention_state.cuh: in an order that no launch changes).
//
// A long history should cost its bytes: STAGES - 1 stages are on their way all the time, from before `wait_for_previous` on
// (the pass began with them). What is computed meanwhile must take less time than they do, so instructions have to overlap:
// hence the loops unrolled here, and rolled in attention_short.cu, whose code runs once.
#include "attention_merge.cuh"
#include "attention_rows.cuh"

// Steps of a product at a time. Registers for more are there up to 16 queries, and some assemblers for later cards than compute
// capability 9.0 spill two of them.
#if __CUDA_ARCH__ > 900
constexpr int OVERLAP = QUERY_TILES == 1 ? 4 : 2;
#else
constexpr int OVERLAP = QUERY_TILES == 1 ? 8 : 2;
#endif

// The part of a piece of K or V that is history, into a tile. A thread keeps to its column of 16 bytes.
DEVICE void load_piece(Tile& tile, const Item& item, int layer, int piece, int value) {
    const int count = min(PIECE, item.sequence.length - piece * PIECE);
    const Number* numbers = (const Number*)(item.sequence.store + Layout::tile(piece, layer, value, blockIdx.y));
    if constexpr (HEAD_SIZE % CHUNK == 0) {
        constexpr int CHUNKS = HEAD_SIZE / CHUNK, ROWS = THREADS / CHUNKS;  // rows at a time
        const int row = threadIdx.x / CHUNKS, column = threadIdx.x % CHUNKS * CHUNK;
        const Number* from = numbers + row * HEAD_SIZE + column;
        if (row >= ROWS) return;
        const auto copy = [&](int n) { copy_async(&tile[Vectors::at(row + n, column)], from + n * HEAD_SIZE); };
        if (count >= PIECE && PIECE % ROWS == 0) {
#pragma unroll
            for (int n = 0; n < PIECE; n += ROWS) copy(n);
        } else {
#pragma unroll 1
            for (int n = 0; row + n < count; n += ROWS) copy(n);
        }
    } else {
        for (int i = threadIdx.x; i < count * HEAD_SIZE; i += THREADS)
            tile[Vectors::at(i / HEAD_SIZE, i % HEAD_SIZE)] = numbers[i];
    }
}

// Walks through the steps of the listed quads [quad, last).
struct Cursor {
    int quad, last, piece;  // `piece`: the step's first

    DEVICE Cursor(const Nodes& quads, int first, int last) : quad(first), last(last), piece(quads.node(first) * QUAD) {}
    DEVICE bool valid() const { return quad < last; }
    DEVICE void next(const Nodes& quads) {
        piece += STEP_PIECES;
        if (piece % QUAD == 0 && ++quad < last) piece = quads.node(quad) * QUAD;
    }
};

// Asks for one stage after the other.
struct Loader {
    const Plan& plan;
    const Nodes& quads;
    const Item& item;
    int layer;
    Cursor at;
    int value = 0, stage = 0;

    DEVICE void next(Shared& shared) {
#pragma unroll 1
        for (int i = 0; i < STEP_PIECES && at.valid(); ++i)
            if (plan.holds(at.piece + i)) load_piece(shared.stages[stage][i], item, layer, at.piece + i, value);
        close_copies();
        if (value) at.next(quads);
        value ^= 1, stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
};

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

// K or V of the pass to their positions in a tile, zeros where there is none. `row`, if it is not -1: only what it sees.
DEVICE void insert_pass(Tile& tile, const Shared& shared, const Item& item, int piece, int value, int row) {
#pragma unroll 1
    for (int place = threadIdx.x / 4; place < PIECE; place += THREADS / 4) {
        const int behind = piece * PIECE + place - item.sequence.length;
        if (behind < 0) continue;
        int source = -1;
        if (row < 0 && behind < item.sequence.rows) source = behind;
        for (int i = 0; row >= 0 && i < item.sequence.rows; ++i)
            if (shared.visible[row] >> i & 1 && shared.positions[i] - item.sequence.length == behind) source = i;
        for (int i = threadIdx.x % 4 * CHUNK; i < DIMS; i += 4 * CHUNK) {
            uint4 numbers = {0, 0, 0, 0};
            if (source >= 0) numbers = *(const uint4*)&shared.fresh[value][Vectors::at(source, i)];
            *(uint4*)&tile[Vectors::at(place, i)] = numbers;
        }
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

// Largest score of a query in a piece of the step.
DEVICE float find_peak(const Shared& shared, int place, int query) {
    float peak = shared.peaks[place][query * MEMBERS];
#pragma unroll
    for (int i = 1; i < MEMBERS; ++i) peak = fmaxf(peak, shared.peaks[place][query * MEMBERS + i]);
    return peak;
}

// A step: what does not change while it is computed.
struct Step {
    Shared& shared;
    const Plan& plan;
    const Item& item;
    int piece;  // the first of them
    int turn;   // the only row that sees, or -1

    DEVICE static int member() { return threadIdx.x / 32 % TEAM; }
    DEVICE static int group() { return threadIdx.x / 32 / TEAM * 16; }

    DEVICE bool overlaps(int place) const {
        return plan.holds(piece + place) && (piece + place + 1) * PIECE > item.sequence.length;
    }

    DEVICE void insert(Tile (&tiles)[STEP_PIECES], int value) const {
#pragma unroll 1
        for (int i = 0; i < STEP_PIECES; ++i)
            if (overlaps(i)) insert_pass(tiles[i], shared, item, piece + i, value, turn);
        __syncthreads();
    }

    // Softmax weights within each piece, rounded, to shared memory.
    DEVICE void weigh_keys(const Tile (&keys)[STEP_PIECES]) const {
        const int lane = threadIdx.x % 32, query = group() + lane / 4, place = member() / MEMBERS;
        const int part = member() % MEMBERS * KEY_TILES * 8;  // of the piece's keys
        const bool active = plan.holds(piece + place) && group() < item.count * RATIO;
        float c[KEY_TILES][4] = {}, peak[2];
        if (active) {
            scores<KEY_TILES, OVERLAP>(c, &shared.queries[group() * Vectors::STRIDE], &keys[place][part * Vectors::STRIDE]);
            if (turn >= 0 || plan.windowed || overlaps(place))
                hide(c, shared, item, query, (piece + place) * PIECE + part + lane % 4 * 2, turn);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            peak[i] = NOTHING;
#pragma unroll
            for (int t = 0; t < KEY_TILES; ++t) peak[i] = fmaxf(peak[i], fmaxf(c[t][i * 2], c[t][i * 2 + 1]));
            peak[i] = fmaxf(peak[i], __shfl_xor_sync(ALL_LANES, peak[i], 1));
            peak[i] = fmaxf(peak[i], __shfl_xor_sync(ALL_LANES, peak[i], 2));
            if (lane % 4 == 0) shared.peaks[place][(query + i * 8) * MEMBERS + member() % MEMBERS] = peak[i];
        }
        if (MEMBERS > 1) __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (MEMBERS > 1) peak[i] = find_peak(shared, place, query + i * 8);
            const float base = peak[i] == NOTHING ? 0.f : peak[i];
#pragma unroll
            for (int t = 0; t < KEY_TILES; ++t)
                store_pair(&shared.weights[place][Weights::at(query + i * 8, part + t * 8 + lane % 4 * 2)],
                           exp_(c[t][i * 2] - base), exp_(c[t][i * 2 + 1] - base));
        }
    }

    // Weighted V of each piece, folded into the quad. What lies where there is no piece is multiplied, too, and left out then.
    DEVICE void add_values(const Tile (&values)[STEP_PIECES], Columns& quad) const {
        const int query = group() + threadIdx.x % 32 / 4, column = member() * VALUE_TILES * 8;
        if (group() >= item.count * RATIO || column >= DIMS) return;
        float o[STEP_PIECES][VALUE_TILES][4] = {}, sums[STEP_PIECES][4] = {};
#pragma unroll
        for (int place = 0; place < STEP_PIECES; ++place)
            weigh<VALUE_TILES, OVERLAP>(o[place], sums[place], &shared.weights[place][group() * Weights::STRIDE],
                                        values[place], column);
#pragma unroll
        for (int place = 0; place < STEP_PIECES; ++place) {
            if (!plan.holds(piece + place)) continue;
            Columns state;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                state.peak[i] = find_peak(shared, place, query + i * 8), state.sum[i] = sums[place][i * 2];
#pragma unroll
                for (int t = 0; t < VALUE_TILES * 2; ++t) state.value[i][t] = o[place][t / 2][i * 2 + t % 2];
            }
            fold(quad, state);
        }
    }
};

// The result of a part for the block's queries, from the fragments of its threads.
DEVICE void write_part(const Workspace& work, const Item& item, int part, const Columns& state) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int query = Step::group() + lane / 4 + i * 8;
        if (query >= item.count * RATIO) continue;
        float* to = work.at(blockIdx.y, blockIdx.x, part, item.first * RATIO + query);
        if (Step::member() == 0 && lane % 4 == 0) *(float2*)(to + Workspace::END) = make_float2(state.peak[i], state.sum[i]);
#pragma unroll
        for (int t = 0; t < VALUE_TILES; ++t) {
            const int d = (Step::member() * VALUE_TILES + t) * 8 + lane % 4 * 2;
            if (d < HEAD_SIZE) *(float2*)(to + d) = make_float2(state.value[i][t * 2], state.value[i][t * 2 + 1]);
        }
    }
}

// The block's range, step by step. The stage that a barrier finds read is asked for anew right behind it.
DEVICE void attend(Shared& shared, const Workspace& work, Loader& loader, int first, int last) {
    const Plan& plan = loader.plan;
    const Nodes& quads = loader.quads;
    const Sequence& sequence = loader.item.sequence;
    Tree<2, 2 * VALUE_TILES> tree;
    Columns quad;
    Part part(quads, first, last);
    int stage = 0, number = 0;
    quad.clear();
#pragma unroll 1
    for (Cursor at(quads, first, last); at.valid();) {
        auto& keys = shared.stages[stage];
        auto& values = shared.stages[stage + 1 < STAGES ? stage + 1 : stage + 1 - STAGES];
        const bool overlaps = min(at.piece + STEP_PIECES, plan.end) * PIECE > sequence.length;
        const int turns = overlaps && !sequence.linear ? loader.item.count : 1;
        wait_copies<STAGES - 2>();
#pragma unroll 1
        for (int turn = 0; turn < turns; ++turn) {
            const Step step = {shared, plan, loader.item, at.piece, overlaps && !sequence.linear ? turn : -1};
            __syncthreads();
            if (turn == 0) loader.next(shared);
            if (overlaps) step.insert(keys, 0);
            step.weigh_keys(keys);
            if (turn == 0) wait_copies<STAGES - 2>();
            __syncthreads();
            if (turn + 1 == turns) loader.next(shared);
            if (overlaps) step.insert(values, 1);
            step.add_values(values, quad);
        }
        stage = (stage + 2) % STAGES;
        const int piece = at.piece, before = at.quad;
        at.next(quads);
        if (at.quad == before) continue;
        const bool ends = at.quad == part.first + part.count;
        if (tree.complete(quad, piece, ends ? -1 : at.piece, 1, part.depth)) write_part(work, loader.item, number++, quad);
        if (ends && at.valid()) part = Part(quads, at.quad, last);
        quad.clear();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention(const Pass* pass, int layer, const float* qkv, const float* q_norm, const float* k_norm, const float* cosines,
          const float* sines, float* workspace, int parts) {
    extern __shared__ uint4 memory[];
    Shared& shared = *(Shared*)memory;
    const Item item = find_item<ITEM_ROWS, ONE_SEQUENCE>(pass, blockIdx.z);
    if (item.count <= 0) return wait_for_previous();
    const Plan plan = make_plan(pass, item);
    const Nodes quads = plan.nodes(1);
    const int first = share(quads, blockIdx.x, gridDim.x), last = share(quads, blockIdx.x + 1, gridDim.x);
    if (first >= last) return wait_for_previous();

    if constexpr (DIMS != HEAD_SIZE) {
        for (int i = threadIdx.x; i < SHARED_BYTES / 16; i += THREADS) memory[i] = {0, 0, 0, 0};
        __syncthreads();
    }
    Loader loader = {plan, quads, item, layer, Cursor(quads, first, last)};
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) loader.next(shared);
    for (int i = threadIdx.x; i < item.sequence.rows; i += THREADS)
        shared.positions[i] = pass->rows[item.sequence.first + i].position;
    __syncthreads();
    if (threadIdx.x < item.count) {
        shared.visible[threadIdx.x] = pass->rows[item.first + threadIdx.x].visible;
        shared.sights[threadIdx.x] = find_sight(pass, shared, item, threadIdx.x);
    }
    const int own = item.sequence.length / PIECE / QUAD, queries = item.count * RATIO;  // `own`: the pass begins there
    const bool reads_pass = quads.node(last - 1) >= own;
    const bool stores = item.index == 0 && quads.listed(own) >= first && quads.listed(own) < last;
    const Heads heads = {qkv, q_norm, k_norm, cosines, sines};

    wait_for_previous();
    let_next_start();
    Preparation{heads, item, layer, queries, queries + (reads_pass ? item.sequence.rows * 2 : 0), stores}.run(shared);
    attend(shared, {workspace, (int)gridDim.x, parts}, loader, first, last);
}

// Grid: MAX_ROWS x NUM_HEADS. `blocks` and `parts` as `attention` had them.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
attention_merge(const Pass* pass, const float* gain, float* attended, float2* stats, float* workspace, int blocks,
                int parts) {
    extern __shared__ Entry entries[];  // [blocks * parts]
    __shared__ MergeShared shared;
    let_next_start();  // hasty (common.cuh): what follows reads nothing early that `attention` writes
    const int row = blockIdx.x, head = blockIdx.y, team = threadIdx.x / 16;
    if (row >= pass->width) return wait_for_previous();
    const int index = ONE_SEQUENCE ? row : pass->rows[row].index;
    const int beyond = index % ITEM_ROWS;
    const Item item = find_item<ITEM_ROWS, ONE_SEQUENCE>(pass, ONE_SEQUENCE ? row / ITEM_ROWS : row - beyond);
    const Plan plan = make_plan(pass, item);
    const Nodes quads = plan.nodes(1);
    Nodes nodes = quads;
    while (nodes.count > MERGE_TEAMS) nodes = plan.nodes(nodes.depth + 1);
    const Slice slice(entries, list_parts(entries, shared.counts, quads, blocks), nodes, team);
    const Workspace work = {workspace, blocks, parts};
    Query::Columns result;
    result.clear();

    wait_for_previous();
    const int depth = merge_parts(result, entries, slice, work, head / RATIO, row * RATIO + head % RATIO, nodes.depth);
    if (depth) Query::store(result, shared.results[team]);
    if (threadIdx.x % 16 == 0) shared.depths[team] = depth, shared.quads[team] = depth ? entries[slice.first].quad : 0;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    merge_teams(result, shared, nodes.count);
    write_result(result, row, head, gain, attended, stats);
}

constexpr int MOVE_THREADS = 256;

// Rows from[0 ... count - 1] (by number, behind the history) of a sequence to the slots right behind its history, in this
// order. Grid: NUM_LAYERS x 2 x NUM_KV_HEADS. All is read before anything is written, so the ranges may overlap.
extern "C" __global__ void __launch_bounds__(MOVE_THREADS)
move_rows(char* store, int length, const int* from, int count) {
    constexpr int WORDS = HEAD_SIZE * KV_BYTES / 4;
    constexpr int EACH = (MAX_WIDTH * WORDS + MOVE_THREADS - 1) / MOVE_THREADS;
    const auto slot = [&](int i) { return (unsigned*)(store + Layout::slot(i, blockIdx.x, blockIdx.y, blockIdx.z)); };
    unsigned words[EACH];
    wait_for_previous();
    let_next_start();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int n = i * MOVE_THREADS + threadIdx.x, row = n / WORDS;
        if (row >= count) continue;
        words[i] = slot(length + from[row])[n % WORDS];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int n = i * MOVE_THREADS + threadIdx.x, row = n / WORDS;
        if (row < count) slot(length + row)[n % WORDS] = words[i];
    }
}
