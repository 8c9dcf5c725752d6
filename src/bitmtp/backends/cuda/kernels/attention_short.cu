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
using Layout = KvLayout<NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE, KV_BYTES>;
using Tile = Number[PIECE * Vectors::STRIDE];

static_assert(DIMS == HEAD_SIZE, "head sizes that are no multiple of 16 are attention.cu's");

struct Shared {
    Tile tiles[SLOTS][2];  // K and V of the block's pieces
    Number queries[QUERIES * Vectors::STRIDE];
    Number weights[PARALLEL][QUERIES * Weights::STRIDE];
    float peaks[PARALLEL][QUERIES * TEAM];
    unsigned long long visible[ITEM_ROWS];
    alignas(16) float results[SLOTS][QUERIES * RESULT];
};

DEVICE int rank() {
    int r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Four floats at the same place in the shared memory of another block of the cluster.
DEVICE float4 load_remote(const float* own, int block) {
    unsigned address;
    float4 v;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(block));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

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

    DEVICE void run(Shared& shared) const {
        constexpr int TEAMS = THREADS / 16;
        const int first = item.sequence.length / PIECE, away = (block - first % CLUSTER + CLUSTER) % CLUSTER;
        const bool owns = first + away < pieces;  // some row of the pass stands in a piece of this block
        const int total = item.count * RATIO + (owns ? 2 * item.sequence.rows : 0);
#pragma unroll 1
        for (int number = threadIdx.x / 16; number - int(threadIdx.x % 32 / 16) < total; number += TEAMS) {
            const Task t = task(number, total);
            Vector vector;
            if (t.wanted) vector.load(heads, t.kind, item.first - item.index + t.row, t.head, t.position);
            vector.finish(t.kind);
            if (t.wanted) store(vector, shared, t);
        }
    }
};

// Scores of positions that a query does not see become minus infinity.
DEVICE void hide(float (&c)[KEY_TILES][4], const Shared& shared, const Item& item, int query, int position) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        unsigned long long bits = shared.visible[min((query + i * 8) / RATIO, item.count - 1)];
#pragma unroll
        for (int t = 0; t < KEY_TILES * 2; ++t) {
            int behind = position + t / 2 * 8 + t % 2 - item.sequence.length;
            if (behind >= 0 && !(behind < 64 && bits >> behind & 1)) c[t / 2][i * 2 + t % 2] = NOTHING;
        }
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
        float* result = &shared.results[slot][(query + i * 8) * RESULT];
        if (member == 0 && lane % 4 == 0) *(float2*)(result + DIMS) = make_float2(peak[i], sums[i * 2]);
#pragma unroll
        for (int t = 0; t < VALUE_TILES; ++t)
            if (column + t * 8 < DIMS)
                *(float2*)(result + column + t * 8 + lane % 4 * 2) = make_float2(o[t][i * 2], o[t][i * 2 + 1]);
    }
}

constexpr int EACH = (QUERIES + CLUSTER - 1) / CLUSTER;  // queries of a block

// Results of the block's queries from all pieces, [pieces][EACH][RESULT].
DEVICE void collect(float* collected, const Shared& shared, int block, int pieces) {
    constexpr int QUADS = RESULT / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < pieces * EACH * QUADS; i += THREADS) {
        const int piece = i / (EACH * QUADS), query = i / QUADS % EACH * CLUSTER + block;
        const float* own = &shared.results[piece / CLUSTER][query * RESULT + i % QUADS * 4];
        ((float4*)collected)[i] = load_remote(own, piece % CLUSTER);
    }
}

// One number of one query from all pieces: four to a node, four nodes to the next, as attention_state.cuh folds them.
DEVICE float merge(const float* collected, int pieces, int dim) {
    State<1, 1> whole, sixteen, node, part;
    whole.clear(), sixteen.clear(), node.clear();
#pragma unroll 1
    for (int piece = 0; piece < pieces; ++piece) {
        const float* result = collected + piece * EACH * RESULT;
        part.peak[0] = result[DIMS], part.sum[0] = result[DIMS + 1], part.value[0][0] = result[dim];
        fold(node, part);
        const bool last = piece + 1 == pieces;
        if (piece % 4 != 3 && !last) continue;
        fold(sixteen, node), node.clear();
        if (piece % 16 != 15 && !last) continue;
        fold(whole, sixteen), sixteen.clear();
    }
    return whole.value[0][0] * __frcp_rn(whole.sum[0]);
}

// The block's share of the queries: results, and what the next kernel's norm and quantisation want to know of them.
DEVICE void write_results(Shared& shared, const Item& item, int block, int pieces, const float* gain, float* attended,
                          float2* stats) {
    float* collected = (float*)shared.tiles;  // K and V are no longer needed
    float* finished = (float*)shared.queries;                // [EACH][DIMS]: no longer needed for q
    static_assert(EACH * DIMS * 4 <= QUERIES * DIMS * KV_BYTES, "results do not fit");
    static_assert(CLUSTER * EACH * RESULT <= PIECE * DIMS * KV_BYTES / 2, "results of the pieces do not fit");
    const int queries = item.count * RATIO;
    collect(collected, shared, block, pieces);
    __syncthreads();
    cluster_arrive();  // this block reads no other's memory any more
#pragma unroll 1
    for (int i = threadIdx.x; i < EACH * DIMS; i += THREADS) {
        const int query = i / DIMS * CLUSTER + block;
        if (query < queries) finished[i] = merge(collected + i / DIMS * RESULT, pieces, i % DIMS);
    }
    __syncthreads();
    const int own = threadIdx.x / 16, query = own * CLUSTER + block;
    if (threadIdx.x / 32 * 2 * CLUSTER + block >= queries || own >= (EACH + 1) / 2 * 2) return;
    const int row = item.first + query / RATIO, head = blockIdx.y * RATIO + query % RATIO;
    float squares = 0, largest = 0;
    if (query < queries) {
#pragma unroll
        for (int i = 0; i < DIMS / 16; ++i) {
            const int d = (i / 4 * 16 + threadIdx.x % 16) * 4 + i % 4, column = head * HEAD_SIZE + d;
            const float x = finished[own * DIMS + d];
            attended[row * OUT_STRIDE + column] = x;
            squares = __fmaf_rn(x, x, squares), largest = fmaxf(largest, fabsf(gain ? x * gain[column] : x));
        }
    }
#pragma unroll
    for (int mask = 8; mask > 0; mask >>= 1) {
        squares += __shfl_xor_sync(ALL_LANES, squares, mask);
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, mask));
    }
    if (query < queries && threadIdx.x % 16 == 0) stats[row * NUM_HEADS + head] = make_float2(squares, largest);
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_short(const Pass* pass, int layer, const float* qkv, const float* q_norm, const float* k_norm,
                const float* cosines, const float* sines, const float* gain, float* attended, float2* stats) {
    extern __shared__ uint4 memory[];
    Shared& shared = *(Shared*)memory;
    const Item item = find_item<ITEM_ROWS, ONE_SEQUENCE>(pass, blockIdx.z);
    if (item.count <= 0) return wait_for_previous();  // the whole cluster leaves
    const int block = rank(), pieces = (item.sequence.length + item.sequence.rows - 1) / PIECE + 1;
#pragma unroll 1
    for (int slot = 0; slot < SLOTS; ++slot)
        if (slot * CLUSTER + block < pieces) load_piece(shared.tiles[slot], item.sequence, layer, slot * CLUSTER + block);
    close_copies();
    if (threadIdx.x < item.count) shared.visible[threadIdx.x] = pass->rows[item.first + threadIdx.x].visible;
    __syncthreads();  // zeros lie where rows of the pass come to lie
    const Heads heads = {qkv, q_norm, k_norm, cosines, sines};

    wait_for_previous();
    let_next_start();
    Preparation{heads, item, layer, block, pieces}.run(shared);
    wait_copies<0>();
    __syncthreads();
#pragma unroll 1
    for (int slot = 0; slot < SLOTS && slot * CLUSTER < pieces; slot += PARALLEL) attend(shared, item, block, pieces, slot);
    cluster_arrive();
    cluster_wait();
    write_results(shared, item, block, pieces, gain, attended, stats);
    cluster_wait();  // no block leaves while another reads its memory
}
