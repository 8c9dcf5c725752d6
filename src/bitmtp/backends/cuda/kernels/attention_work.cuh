// How a block is made up, its shared memory, and what blocks leave for one another.
#pragma once

#include "attention_plan.cuh"
#include "attention_state.cuh"
#include "attention_tiles.cuh"
#include "kv.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int RATIO = NUM_HEADS / NUM_KV_HEADS;
constexpr int MAX_QUERIES = 32;  // of a block: two tiles of 16
constexpr int ITEM_ROWS = MAX_ROWS * RATIO < MAX_QUERIES ? MAX_ROWS : MAX_QUERIES / RATIO;
constexpr int TILES = ITEM_ROWS * RATIO > 16 ? 2 : 1;  // of 16 queries
constexpr int QUERIES = TILES * 16;
constexpr int TEAM = WARPS / TILES;                          // warps of one tile
constexpr int KEY_TILES = PIECE / 8 / TEAM;                  // of 8 keys, per warp
constexpr int VALUE_TILES = (DIMS / 8 + TEAM - 1) / TEAM;    // of 8 columns, per warp
constexpr int CHUNK = 16 / KV_BYTES;                         // numbers of a 16-byte copy
constexpr int PASS_QUERIES = MAX_ROWS * RATIO;               // of one K/V head
using Layout = KvLayout<NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE, KV_BYTES>;
using Columns = State<2, 2 * VALUE_TILES>;  // of two queries of a thread

static_assert(RATIO <= MAX_QUERIES, "more query heads to a K/V head than a block has queries");

using Tile = Number[PIECE * Vectors::STRIDE];

struct Shared {
    Tile tiles[STAGES][2];  // K and V of pieces
    Number fresh[2][MAX_ROWS * Vectors::STRIDE];       // K and V of the rows of the pass, by number
    Number queries[QUERIES * Vectors::STRIDE];
    Number weights[QUERIES * Weights::STRIDE];
    float peaks[QUERIES * TEAM];
    Sight sights[MAX_ROWS];                // of the item's rows
    unsigned long long visible[MAX_ROWS];  // likewise, by number of the row seen
    int positions[MAX_ROWS];               // of the sequence's rows
    bool last;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory is counted differently in attention.py");

// Results of nodes, until the last block reads them: V, then peak and sum. The counters are zero between launches.
struct Workspace {
    static constexpr int STRIDE = (HEAD_SIZE + 3) / 4 * 4 + 4;  // floats of a query
    static constexpr int END = STRIDE - 4;
    unsigned* counters;  // [NUM_KV_HEADS][MAX_WIDTH]
    float* results;      // [NUM_KV_HEADS][slots][PASS_QUERIES][STRIDE]

    DEVICE Workspace(char* memory) {
        counters = (unsigned*)memory;
        results = (float*)(memory + NUM_KV_HEADS * MAX_WIDTH * 4);
    }
    DEVICE float* at(int node, int query) const {
        return results + (((long long)blockIdx.y * (2 * gridDim.x) + node) * PASS_QUERIES + query) * STRIDE;
    }
};
