// How a block is made up, its shared memory, and what blocks leave for the merge.
#pragma once

#include "attention_plan.cuh"
#include "attention_state.cuh"
#include "attention_tiles.cuh"
#include "kv.cuh"

constexpr int RATIO = NUM_HEADS / NUM_KV_HEADS;
constexpr int MAX_QUERIES = 32;  // of a block: two tiles of 16
constexpr int ITEM_ROWS = MAX_ROWS * RATIO < MAX_QUERIES ? MAX_ROWS : MAX_QUERIES / RATIO;
constexpr int QUERY_TILES = ITEM_ROWS * RATIO > 16 ? 2 : 1;
constexpr int QUERIES = QUERY_TILES * 16;
constexpr int TEAM = 4;  // warps of a tile of queries
constexpr int THREADS = QUERY_TILES * TEAM * 32;
constexpr int MEMBERS = TEAM / STEP_PIECES;                       // warps that share the keys of a piece
constexpr int KEY_TILES = PIECE / 8 / MEMBERS;             // of 8 keys, per warp
constexpr int VALUE_TILES = (DIMS / 8 + TEAM - 1) / TEAM;  // of 8 columns, per warp
constexpr int CHUNK = 16 / KV_BYTES;                       // numbers of a 16-byte copy
constexpr int PASS_QUERIES = MAX_ROWS * RATIO;             // of one K/V head
using Layout = KvLayout<NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE, KV_BYTES>;
using Columns = State<2, 2 * VALUE_TILES>;  // of two queries of a thread

static_assert(RATIO <= MAX_QUERIES, "more query heads to a K/V head than a block has queries");
static_assert(STAGES >= 2 && QUAD % STEP_PIECES == 0, "a step is a part of a quad, and the next one is on its way");

using Tile = Number[PIECE * Vectors::STRIDE];

struct Shared {
    Tile stages[STAGES][STEP_PIECES];                    // K of a step, V of a step, K of the next ...
    Number fresh[2][MAX_ROWS * Vectors::STRIDE];  // K and V of the rows of the pass, by number
    Number queries[QUERIES * Vectors::STRIDE];
    Number weights[STEP_PIECES][QUERIES * Weights::STRIDE];
    float peaks[STEP_PIECES][QUERIES * MEMBERS];
    Sight sights[MAX_ROWS];                // of the item's rows
    unsigned long long visible[MAX_ROWS];  // likewise, by number of the row seen
    int positions[MAX_ROWS];               // of the sequence's rows
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory is counted differently in attention.py");

// Results of the parts of blocks: V, then peak and sum.
struct Workspace {
    static constexpr int STRIDE = (HEAD_SIZE + 3) / 4 * 4 + 4;  // floats of a query
    static constexpr int END = STRIDE - 4;
    float* results;  // [NUM_KV_HEADS][blocks][parts][PASS_QUERIES][STRIDE]
    int blocks, parts;

    DEVICE float* at(int head, int block, int part, int query) const {
        return results + (((long long)(head * blocks + block) * parts + part) * PASS_QUERIES + query) * STRIDE;
    }
};
