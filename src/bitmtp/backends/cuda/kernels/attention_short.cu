// Attention of one layer behind a short history, for compute capability 9.0 and later: the blocks that share a K/V head form
// a cluster, each takes every CLUSTER-th piece, and the pieces are put together through the cluster's shared memory.
//
// The same arithmetic as attention.cu, bit for bit (its test compares them), without what only long histories, windows and
// trees need: at most SLOTS * CLUSTER pieces, every row at position length + index of its sequence, all of the history seen.
// K/V of the history are older than the kernel before this one, so they come while it still runs.
//
// Constants: as in attention.cu, without STAGES and SHARED_BYTES; CLUSTER blocks; SLOTS: pieces of a block, PARALLEL of them
// at once: four warps for each of those and each 16 queries.
// Grid: CLUSTER x NUM_KV_HEADS x items.
#include "attention_plan.cuh"
#include "attention_rows.cuh"
#include "attention_state.cuh"
#include "attention_tiles.cuh"
#include "cluster.cuh"
#include "kv.cuh"

constexpr int RATIO = NUM_HEADS / NUM_KV_HEADS;
constexpr int MAX_QUERIES = 32;  // of a block: two tiles of 16
constexpr int ITEM_ROWS = MAX_ROWS * RATIO < MAX_QUERIES ? MAX_ROWS : MAX_QUERIES / RATIO;
constexpr int QUERY_TILES = ITEM_ROWS * RATIO > 16 ? 2 : 1;
constexpr int QUERIES = QUERY_TILES * 16;
constexpr int TEAM = 4;  // warps of a piece and a tile of queries
constexpr int THREADS = TEAM * 32 * QUERY_TILES * PARALLEL;
constexpr int KEY_TILES = PIECE / 8 / TEAM;                // of 8 keys, per warp
constexpr int VALUE_TILES = (DIMS / 8 + TEAM - 1) / TEAM;  // of 8 columns, per warp
constexpr int CHUNK = 16 / KV_BYTES;                       // numbers of a 16-byte copy
constexpr int RESULT = DIMS + 4;                           // floats of a query's result: values, peak, sum
constexpr int EACH = (QUERIES + CLUSTER - 1) / CLUSTER;    // queries that one block finishes
constexpr int NODES = SLOTS * CLUSTER / 4;                 // of four pieces
using Layout = KvLayout<NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE, KV_BYTES>;
using Tile = Number[PIECE * Vectors::STRIDE];

static_assert(DIMS == HEAD_SIZE, "head sizes that are no multiple of 16 are attention.cu's");

struct Shared {
    Tile tiles[SLOTS][2];  // K and V of the block's pieces
    Number queries[QUERIES * Vectors::STRIDE];
    Number weights[PARALLEL][QUERIES * Weights::STRIDE];
    float peaks[PARALLEL][QUERIES * TEAM];
    unsigned long long visible[ITEM_ROWS];
    // Of the queries that this block finishes: results of all pieces, sent by the blocks that have them.
    alignas(16) float results[NODES * 4][EACH][RESULT];
};

static_assert(NODES * EACH * RESULT * sizeof(float) <= sizeof(Shared::tiles), "K and V leave no room for nodes");

// The part of a piece that is history, and zeros for V behind it: what is invisible is multiplied by zero.
DEVICE void load_piece(Tile (&tile)[2], const Sequence& sequence, int layer, int piece) {
    constexpr int CHUNKS = DIMS / CHUNK;
    const Number* keys = (const Number*)(sequence.store + Layout::tile(piece, layer, 0, blockIdx.y));
    const Number* values = (const Number*)(sequence.store + Layout::tile(piece, layer, 1, blockIdx.y));
    const int count = min(PIECE, sequence.length - piece * PIECE);
#pragma unroll 2
    for (int i = threadIdx.x; i < PIECE * CHUNKS; i += THREADS) {
        int row = i / CHUNKS, at = Vectors::at(row, i % CHUNKS * CHUNK);
        if (row < count) {
            copy_async(&tile[0][at], keys + i * CHUNK);
            copy_async(&tile[1][at], values + i * CHUNK);
        } else {
            *(uint4*)&tile[0][at] = *(uint4*)&tile[1][at] = make_uint4(0, 0, 0, 0);
        }
    }
}

// q of the item's rows, and K and V of those rows of the pass that stand in this block's pieces; the first item stores them.
// A half warp takes a vector at a time.
struct Preparation {
    const Heads& heads;
    const Item& item;
    int layer, block, pieces;

    struct Task {
        Kind kind;
        int number, row, head, position;
        bool wanted;
    };

    DEVICE Task task(int number, int total) const {
        const int queries = item.count * RATIO, other = number - queries;
        Task t;
        t.number = number;
        t.kind = number < queries ? QUERY : other % 2 ? VALUE : KEY;
        t.row = number < queries ? item.index + number / RATIO : other / 2;
        t.head = t.kind == QUERY  ? blockIdx.y * RATIO + number % RATIO
                 : t.kind == KEY ? NUM_HEADS + blockIdx.y
                                 : NUM_HEADS + NUM_KV_HEADS + blockIdx.y;
        t.position = item.sequence.length + t.row;
        t.wanted = number < total && (t.kind == QUERY || t.position / PIECE % CLUSTER == block);
        return t;
    }

    DEVICE void store(const Vector& vector, Shared& shared, const Task& t) const {
        if (t.kind == QUERY) return vector.store(shared.queries, t.number);
        vector.store(shared.tiles[t.position / PIECE / CLUSTER][t.kind == VALUE], t.position % PIECE);
        long long slot = Layout::slot(t.position, layer, t.kind == VALUE, blockIdx.y);
        if (item.index == 0) vector.store((Number*)(item.sequence.store + slot));
    }

    DEVICE void load_constants(Vector& vector, const Task& t) const {
        if (t.wanted) vector.load_constants(heads, t.kind, t.position);
    }

    DEVICE void load_numbers(Vector& vector, const Task& t) const {
        if (t.wanted) vector.load_numbers(heads, item.first - item.index + t.row, t.head);
    }

    DEVICE void finish(Vector& vector, Shared& shared, const Task& t) const {
        vector.finish(t.kind);
        if (t.wanted) store(vector, shared, t);
    }

    DEVICE int total() const {
        const int first = item.sequence.length / PIECE, away = (block - first % CLUSTER + CLUSTER) % CLUSTER;
        const bool owns = first + away < pieces;  // some row of the pass stands in a piece of this block
        return item.count * RATIO + (owns ? 2 * item.sequence.rows : 0);
    }
};

// The vectors of a half warp, two on their way at a time.
struct Pair {
    static constexpr int TEAMS = THREADS / 16;
    Preparation::Task task;
    Vector vector;
    int number, total;  // of the first vector; of all of them

    // Before the kernel before this one has ended.
    DEVICE Pair(const Preparation& p) : number(threadIdx.x / 16), total(p.total()) { begin(p); }

    DEVICE void begin(const Preparation& p) {
        task = p.task(number, total);
        p.load_constants(vector, task);
    }

    DEVICE void run(const Preparation& p, Shared& shared) {
        const int half = threadIdx.x % 32 / 16;  // both halves of a warp go on, or none
#pragma unroll 1
        while (number - half < total) {
            const bool two = number + TEAMS - half < total;
            const Preparation::Task other = p.task(number + TEAMS, total);
            Vector second;
            p.load_numbers(vector, task);
            if (two) p.load_numbers(second, other), p.load_constants(second, other);
            p.finish(vector, shared, task);
            if (two) p.finish(second, shared, other);
            number += 2 * TEAMS;
            if (number - half < total) begin(p);
        }
    }
};

// Scores of positions that a query does not see become minus infinity.
DEVICE void hide(float (&c)[KEY_TILES][4], const Shared& shared, const Item& item, int query, int position) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned long long bits = shared.visible[min((query + i * 8) / RATIO, item.count - 1)];
        const int behind = position - item.sequence.length;  // what is not behind the history is seen
        const unsigned seen = behind >= 64    ? 0
                              : behind >= 0   ? unsigned(bits >> behind)
                              : behind <= -32 ? ~0u
                                              : unsigned(bits) << -behind | ((1u << -behind) - 1);
#pragma unroll
        for (int t = 0; t < KEY_TILES * 2; ++t)
            if (!(seen >> (t / 2 * 8 + t % 2) & 1)) c[t / 2][i * 2 + t % 2] = NOTHING;
    }
}

// PARALLEL pieces, from slot `first` on, each for all queries: scores, softmax within the piece, weighted V.
DEVICE void attend(Shared& shared, const Item& item, int block, int pieces, int first) {
    const int lane = threadIdx.x % 32, team = threadIdx.x / 32 / TEAM, member = threadIdx.x / 32 % TEAM;
    const int place = team / QUERY_TILES, slot = first + place, group = team % QUERY_TILES * 16;
    const int piece = slot * CLUSTER + block;
    const int query = group + lane / 4, column = member * VALUE_TILES * 8;
    const bool active = group < item.count * RATIO && piece < pieces;
    const Tile(&tile)[2] = shared.tiles[slot];
    float c[KEY_TILES][4] = {}, o[VALUE_TILES][4] = {}, sums[4] = {}, peak[2];
    if (active) scores(c, &shared.queries[group * Vectors::STRIDE], &tile[0][member * KEY_TILES * 8 * Vectors::STRIDE]);
    if (active && (piece + 1) * PIECE > item.sequence.length)
        hide(c, shared, item, query, piece * PIECE + member * KEY_TILES * 8 + lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        peak[i] = NOTHING;
#pragma unroll
        for (int t = 0; t < KEY_TILES; ++t) peak[i] = fmaxf(peak[i], fmaxf(c[t][i * 2], c[t][i * 2 + 1]));
        peak[i] = fmaxf(peak[i], __shfl_xor_sync(ALL_LANES, peak[i], 1));
        peak[i] = fmaxf(peak[i], __shfl_xor_sync(ALL_LANES, peak[i], 2));
        if (lane % 4 == 0) shared.peaks[place][(query + i * 8) * TEAM + member] = peak[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float4 p = *(const float4*)&shared.peaks[place][(query + i * 8) * TEAM];
        peak[i] = fmaxf(fmaxf(fmaxf(p.x, p.y), fmaxf(p.z, p.w)), peak[i]);
        float base = peak[i] == NOTHING ? 0.f : peak[i];
#pragma unroll
        for (int t = 0; t < KEY_TILES; ++t)
            store_pair(&shared.weights[place][Weights::at(query + i * 8, (member * KEY_TILES + t) * 8 + lane % 4 * 2)],
                       exp_(c[t][i * 2] - base), exp_(c[t][i * 2 + 1] - base));
    }
    __syncthreads();
    if (!active || column >= DIMS) return;
    weigh(o, sums, &shared.weights[place][group * Weights::STRIDE], tile[1], column);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int q = query + i * 8;
        if (q >= item.count * RATIO) continue;
        const unsigned result = remote(shared.results[piece][q % EACH], q / EACH);
        if (member == 0 && lane % 4 == 0) send(result + DIMS * 4, peak[i], sums[i * 2]);
#pragma unroll
        for (int t = 0; t < VALUE_TILES; ++t)
            if (column + t * 8 < DIMS) send(result + (column + t * 8 + lane % 4 * 2) * 4, o[t][i * 2], o[t][i * 2 + 1]);
    }
}

// Results of a query, four neighbouring columns of them.
using Quad = State<1, 4>;

DEVICE Quad load_quad(const float* result, int quad) {
    const float4 v = ((const float4*)result)[quad];
    const float2 s = *(const float2*)(result + DIMS);
    return {{s.x}, {s.y}, {{v.x, v.y, v.z, v.w}}};
}

// The first `count` of four neighbours [4][stride], in order, as attention_state.cuh folds them.
DEVICE Quad fold_four(const float* first, int stride, int quad, int count) {
    Quad part[4], node;
    node.clear();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        part[i].clear();
        if (i < count) part[i] = load_quad(first + i * stride, quad);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) fold(node, part[i]);
    return node;
}

// Pieces of the block's queries become nodes [NODES][EACH][RESULT].
DEVICE void fold_pieces(float* nodes, const Shared& shared, int pieces) {
    constexpr int QUADS = DIMS / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < (pieces + 3) / 4 * EACH * QUADS; i += THREADS) {
        const int node = i / (EACH * QUADS), query = i / QUADS % EACH, quad = i % QUADS;
        const Quad q = fold_four(shared.results[node * 4][query], EACH * RESULT, quad, pieces - node * 4);
        float* to = nodes + (node * EACH + query) * RESULT;
        ((float4*)to)[quad] = make_float4(q.value[0][0], q.value[0][1], q.value[0][2], q.value[0][3]);
        if (quad == 0) *(float2*)(to + DIMS) = make_float2(q.peak[0], q.sum[0]);
    }
}

// The half warp that finishes a query of the block: lane l has the quads l, l + 16, … of the head.
struct Finish {
    static constexpr int COUNT = DIMS / 64;
    int row, head;
    bool valid;
    float gain[COUNT][4];

    DEVICE static int column(int i) { return (i * 16 + threadIdx.x % 16) * 4; }

    // Its loads are under way while the cluster meets.
    DEVICE Finish(const Item& item, int block, const float* gains) {
        const int query = block * EACH + threadIdx.x / 16;
        valid = threadIdx.x / 16 < EACH && query < item.count * RATIO;
        row = item.first + query / RATIO, head = blockIdx.y * RATIO + query % RATIO;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            gain[i][0] = gain[i][1] = gain[i][2] = gain[i][3] = 1;
            if (valid && gains) load_vector(gain[i], gains + head * HEAD_SIZE + column(i));
        }
    }

    // Results, and what the next kernel's norm and quantisation want to know of them.
    DEVICE void run(const float* nodes, int count, float* attended, float2* stats) const {
        if (threadIdx.x / 32 * 2 >= EACH) return;
        const float* own = nodes + threadIdx.x / 16 % EACH * RESULT;
        float squares = 0, largest = 0;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            Quad whole;
            whole.clear();
#pragma unroll
            for (int node = 0; node < NODES; node += 4) {
                if (node < count) fold(whole, fold_four(own + node * EACH * RESULT, EACH * RESULT, column(i) / 4, count - node));
            }
            float x[4], inverse = __frcp_rn(whole.sum[0]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                x[j] = whole.value[0][j] * inverse;
                squares = __fmaf_rn(x[j], x[j], squares), largest = fmaxf(largest, fabsf(x[j] * gain[i][j]));
            }
            if (valid) *(float4*)(attended + row * OUT_STRIDE + head * HEAD_SIZE + column(i)) = make_float4(x[0], x[1], x[2], x[3]);
        }
#pragma unroll
        for (int mask = 8; mask > 0; mask >>= 1) {
            squares += __shfl_xor_sync(ALL_LANES, squares, mask);
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, mask));
        }
        if (valid && threadIdx.x % 16 == 0) stats[row * NUM_HEADS + head] = make_float2(squares, largest);
    }
};

// On compute capability 9.0 no more registers than products take: theirs of the layer before and of this one may be in use at
// the same time.
#if __CUDA_ARCH__ == 900
constexpr int BLOCKS = 768 / THREADS;
#else
constexpr int BLOCKS = 1;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_short(const Pass* pass, int layer, const float* qkv, const float* q_norm, const float* k_norm,
                const float* cosines, const float* sines, const float* gain, float* attended, float2* stats) {
    extern __shared__ uint4 memory[];
    Shared& shared = *(Shared*)memory;
    const Item item = find_item<ITEM_ROWS, ONE_SEQUENCE>(pass, blockIdx.z);
    if (item.count <= 0) return wait_for_previous();  // the whole cluster leaves
    cluster_arrive();
    const int block = cluster_rank(), pieces = (item.sequence.length + item.sequence.rows - 1) / PIECE + 1;
#pragma unroll 1
    for (int slot = 0; slot < SLOTS; ++slot)
        if (slot * CLUSTER + block < pieces) load_piece(shared.tiles[slot], item.sequence, layer, slot * CLUSTER + block);
    close_copies();
    if (threadIdx.x < item.count) shared.visible[threadIdx.x] = pass->rows[item.first + threadIdx.x].visible;
    __syncthreads();  // zeros lie where rows of the pass come to lie
    const Heads heads = {qkv, q_norm, k_norm, cosines, sines};
    const Preparation preparation{heads, item, layer, block, pieces};
    Pair pair(preparation);
    cluster_wait();  // every block of the cluster is there: its shared memory may be written

    wait_for_previous();
    let_next_start();
    pair.run(preparation, shared);
    wait_copies<0>();
    __syncthreads();
#pragma unroll 1
    for (int slot = 0; slot < SLOTS && slot * CLUSTER < pieces; slot += PARALLEL) attend(shared, item, block, pieces, slot);
    const Finish finish(item, block, gain);
    cluster_arrive();
    cluster_wait();  // nobody writes to another's memory any more
    float* nodes = (float*)shared.tiles;  // K and V are no longer needed
    fold_pieces(nodes, shared, pieces);
    __syncthreads();
    finish.run(nodes, (pieces + 3) / 4, attended, stats);
}
