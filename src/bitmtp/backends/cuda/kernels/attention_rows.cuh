// From the product's outputs to the q, k and v of a pass: norm of a head, rotary embedding, scale, rounding.
#pragma once

#include "attention_tiles.cuh"

// What every row needs; see the kernel's own arguments.
struct Heads {
    const float* qkv;
    const float *q_norm, *k_norm;
    const float *cosines, *sines;
};

enum Kind : int { QUERY, KEY, VALUE };

// One vector of HEAD_SIZE numbers in a half warp: a lane has STEP neighbours of either half, and so on.
struct Vector {
    static constexpr int HALF = HEAD_SIZE / 2;
    static constexpr int STEP = HALF % 64 == 0 ? 4 : HALF % 32 == 0 ? 2 : 1;
    static constexpr int STEPS = (HALF + 16 * STEP - 1) / (16 * STEP);
    float low[STEPS][STEP], high[STEPS][STEP];
    float low_gain[STEPS][STEP], high_gain[STEPS][STEP];
    float cosine[STEPS][STEP], sine[STEPS][STEP];

    DEVICE static int dim(int step) { return (step * 16 + threadIdx.x % 16) * STEP; }

    // Loads only, so that several vectors can be on their way.
    DEVICE void load(const Heads& heads, Kind kind, int row, int head, int position) {
        load_numbers(heads, row, head);
        load_constants(heads, kind, position);
    }

    // `head` counts through q, k and v heads.
    DEVICE void load_numbers(const Heads& heads, int row, int head) {
        const float* from = heads.qkv + row * QKV_STRIDE + head * HEAD_SIZE;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            int d = dim(i);
#pragma unroll
            for (int j = 0; j < STEP; ++j) low[i][j] = high[i][j] = 0;
            if (d < HALF) load_vector(low[i], from + d), load_vector(high[i], from + HALF + d);
        }
    }

    // What no kernel has written.
    DEVICE void load_constants(const Heads& heads, Kind kind, int position) {
        const float* gain = kind == QUERY ? heads.q_norm : heads.k_norm;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            int d = dim(i);
            if (d >= HALF || kind == VALUE) continue;
            if (QK_NORM) load_vector(low_gain[i], gain + d), load_vector(high_gain[i], gain + HALF + d);
            load_vector(cosine[i], heads.cosines + position * HALF + d);
            load_vector(sine[i], heads.sines + position * HALF + d);
        }
    }

    // All lanes of the half warp take part, whatever they hold.
    DEVICE void finish(Kind kind) {
        float factor = kind == QUERY ? float(SCALE) : 1.f, inverse = 1.f, squares = 0;
        if (QK_NORM) {
#pragma unroll
            for (int i = 0; i < STEPS * STEP; ++i) {
                float x = low[i / STEP][i % STEP], y = high[i / STEP][i % STEP];
                squares = __fmaf_rn(x, x, __fmaf_rn(y, y, squares));
            }
#pragma unroll
            for (int mask = 8; mask > 0; mask >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, mask);
            inverse = inverse_root(squares * (1.f / HEAD_SIZE) + float(NORM_EPS));
        }
        if (kind == VALUE) return;
#pragma unroll
        for (int n = 0; n < STEPS * STEP; ++n) {
            int i = n / STEP, j = n % STEP;
            float x = low[i][j], y = high[i][j];
            if (QK_NORM) x = (x * inverse) * low_gain[i][j], y = (y * inverse) * high_gain[i][j];
            low[i][j] = (x * cosine[i][j] - y * sine[i][j]) * factor;
            high[i][j] = (y * cosine[i][j] + x * sine[i][j]) * factor;
        }
    }

    // As a row of a tile, or as the store has it.
    DEVICE void store(Number* tile, int row) const {
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            if (dim(i) >= HALF) continue;
            store_vector(tile + Vectors::at(row, dim(i)), low[i]);
            store_vector(tile + Vectors::at(row, HALF + dim(i)), high[i]);
        }
    }
    DEVICE void store(Number* to) const {
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            if (dim(i) >= HALF) continue;
            store_vector(to + dim(i), low[i]), store_vector(to + HALF + dim(i), high[i]);
        }
    }
};
