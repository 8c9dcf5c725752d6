// Where K and V of a position lie in a sequence's store.
//
// The store is cut into blocks of PIECE positions; a block holds, for every layer, K then V, for every K/V head, its PIECE
// positions one after the other. A sequence grows by mapping memory for more blocks behind the last: nothing moves, no layer
// wastes a page of its own, and a piece of one head is one contiguous tile of PIECE * HEAD_DIM numbers.
#pragma once

#include "common.cuh"

template <int LAYERS, int KV_HEADS, int HEAD_DIM, int BYTES>
struct KvLayout {
    static constexpr long long TILE = (long long)PIECE * HEAD_DIM * BYTES;
    static constexpr long long BLOCK = TILE * KV_HEADS * 2 * LAYERS;

    // First byte of the tile of `piece`; value = 0: K, 1: V.
    DEVICE static long long tile(int piece, int layer, int value, int head) {
        return piece * BLOCK + ((layer * 2 + value) * KV_HEADS + head) * TILE;
    }

    DEVICE static long long slot(int slot, int layer, int value, int head) {
        return tile(slot / PIECE, layer, value, head) + (long long)(slot % PIECE) * HEAD_DIM * BYTES;
    }
};
