// Products of small tiles in shared memory. A row of the first factor is a query; 16 of them make a tile, and always are one,
// so that a query's results do not depend on how many there are. Each result depends on its row and its column alone.
//
// UNROLL: steps of 16 dimensions or positions without a branch between them; code that runs once had better be short.
// Lane l holds of a result of 16 x 8: c[0], c[1] of row l / 4, c[2], c[3] of row l / 4 + 8, columns l % 4 * 2 and the next.
#pragma once

#include "attention_ptx.cuh"

#if KV_BYTES == 2
using Number = half_bits;
constexpr float LARGEST = 65504.f;
DEVICE Number to_number(float x) { return to_half(x); }
#else
using Number = float;
constexpr float LARGEST = 3.402823466e38f;
DEVICE Number to_number(float x) { return x; }
#endif

// K and V are finite whatever comes in: what a row does not see is multiplied by zero.
DEVICE Number to_finite(float x) { return to_number(fminf(fmaxf(x, -LARGEST), LARGEST)); }

// N neighbouring numbers, in the fewest words.
template <int N>
DEVICE void store_vector(Number* to, const float (&x)[N]) {
    if constexpr (N % 2 == 0 && KV_BYTES == 2) {
#pragma unroll
        for (int i = 0; i < N; i += 2) *(unsigned*)(to + i) = to_finite(x[i]) | (unsigned)to_finite(x[i + 1]) << 16;
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = to_finite(x[i]);
    }
}

constexpr int DIMS = (HEAD_SIZE + 15) / 16 * 16;  // what is beyond HEAD_SIZE is zero

// Rows of a tile of COLUMNS lie one behind the other, and yet in different banks: 16-byte chunks change places within a row
// as its number says, or, where that does not come out even, rows are longer than they need be.
template <int COLUMNS>
struct Rows {
    static constexpr bool SWAPPED = KV_BYTES == 2 && COLUMNS % 64 == 0;
    static constexpr int STRIDE = COLUMNS + (SWAPPED ? 0 : 16 / KV_BYTES);
    DEVICE static int at(int row, int column) { return row * STRIDE + (SWAPPED ? column ^ row % 8 * 8 : column); }
};
using Vectors = Rows<DIMS>;   // q, k, v
using Weights = Rows<PIECE>;  // of the softmax

#if KV_BYTES == 2

// c[t] = q[16][DIMS] times keys 8t ... 8t + 7; even and odd steps of 16 dimensions apart: two short chains.
template <int TILES, int UNROLL = 2>
DEVICE void scores(float (&c)[TILES][4], const Number* q, const Number* keys) {
    int lane = threadIdx.x % 32;
    float odd[TILES][4] = {};
#pragma unroll UNROLL
    for (int step = 0; step < DIMS / 16; ++step) {
        unsigned a[4], b[2];
        load_matrices(a, q + Vectors::at(lane % 16, step * 16 + lane / 16 * 8));
#pragma unroll
        for (int t = 0; t + 1 < TILES; t += 2) {  // two at a time
            unsigned pair[4];
            load_matrices(pair, keys + Vectors::at(t * 8 + lane % 8 + lane / 16 * 8, step * 16 + lane / 8 % 2 * 8));
            multiply_add(step % 2 ? odd[t] : c[t], a, {pair[0], pair[1]});
            multiply_add(step % 2 ? odd[t + 1] : c[t + 1], a, {pair[2], pair[3]});
        }
        if constexpr (TILES % 2) {
            load_matrices(b, keys + Vectors::at((TILES - 1) * 8 + lane % 8, step * 16 + lane / 8 % 2 * 8));
            multiply_add(step % 2 ? odd[TILES - 1] : c[TILES - 1], a, b);
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[t][i] += odd[t][i];
}

// c[t] = weights[16][PIECE] times columns column + 8t ... of values[PIECE]; sums: of the weights of each row, in
// every column.
template <int TILES, int UNROLL = 2>
DEVICE void weigh(float (&c)[TILES][4], float (&sums)[4], const Number* weights, const Number* values, int column) {
    int lane = threadIdx.x % 32;
    const unsigned ones[2] = {0x3c003c00u, 0x3c003c00u};
#pragma unroll UNROLL
    for (int step = 0; step < PIECE / 16; ++step) {
        unsigned a[4], b[2];
        load_matrices(a, weights + Weights::at(lane % 16, step * 16 + lane / 16 * 8));
        multiply_add(sums, a, ones);
#pragma unroll
        for (int t = 0; t + 1 < TILES; t += 2) {
            unsigned pair[4];
            load_transposed(pair, values + Vectors::at(step * 16 + lane % 16, column + t * 8 + lane / 16 * 8));
            multiply_add(c[t], a, {pair[0], pair[1]});
            multiply_add(c[t + 1], a, {pair[2], pair[3]});
        }
        if constexpr (TILES % 2) {
            load_transposed(b, values + Vectors::at(step * 16 + lane % 16, column + (TILES - 1) * 8));
            multiply_add(c[TILES - 1], a, b);
        }
    }
}

DEVICE void store_pair(Number* to, float x, float y) { *(unsigned*)to = to_half(x) | (unsigned)to_half(y) << 16; }

#else

template <int TILES, int UNROLL = 2>
DEVICE void scores(float (&c)[TILES][4], const Number* q, const Number* keys) {
    int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll 4
    for (int d = 0; d < HEAD_SIZE; ++d) {
        float upper = q[Vectors::at(row, d)], lower = q[Vectors::at(row + 8, d)];
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const Number* key = keys + Vectors::at(t * 8 + column, d);
            c[t][0] = __fmaf_rn(upper, key[0], c[t][0]), c[t][1] = __fmaf_rn(upper, key[Vectors::STRIDE], c[t][1]);
            c[t][2] = __fmaf_rn(lower, key[0], c[t][2]), c[t][3] = __fmaf_rn(lower, key[Vectors::STRIDE], c[t][3]);
        }
    }
}

template <int TILES, int UNROLL = 2>
DEVICE void weigh(float (&c)[TILES][4], float (&sums)[4], const Number* weights, const Number* values, int column) {
    int row = threadIdx.x % 32 / 4;
#pragma unroll 4
    for (int key = 0; key < PIECE; ++key) {
        float upper = weights[Weights::at(row, key)], lower = weights[Weights::at(row + 8, key)];
        sums[0] += upper, sums[2] += lower;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const Number* value = values + Vectors::at(key, column + t * 8 + threadIdx.x % 4 * 2);
            c[t][0] = __fmaf_rn(upper, value[0], c[t][0]), c[t][1] = __fmaf_rn(upper, value[1], c[t][1]);
            c[t][2] = __fmaf_rn(lower, value[0], c[t][2]), c[t][3] = __fmaf_rn(lower, value[1], c[t][3]);
        }
    }
}

DEVICE void store_pair(Number* to, float x, float y) { to[0] = x, to[1] = y; }

#endif
