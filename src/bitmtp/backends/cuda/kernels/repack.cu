// From the checkpoint's rows to the order of matrix.cuh; runs once, when a model is loaded.
//
// Constants: BITS, INPUTS (of the checkpoint, not padded). One thread a (cell, lane); `rows` outputs are read from `source`
// [rows][INPUTS * BITS / 8] and go to row tiles first_tile, first_tile + tile_step, …; what lies outside becomes zero.
#include "matrix.cuh"

constexpr int GROUPS = (INPUTS + GROUP - 1) / GROUP;

DEVICE unsigned four(const unsigned char* source, int row, int rows, int input) {  // four weights, a signed byte each
    if (row >= rows || input >= INPUTS) return 0;
    const unsigned char* at = source + ((long long)row * INPUTS + input) * BITS / 8;
    unsigned out = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        int value = BITS == 2 ? (at[0] >> (2 * b) & 3) - 1 : BITS == 4 ? (at[b / 2] >> (b % 2 * 4) & 15) - 8 : (signed char)at[b];
        out |= (unsigned)(value & 0xff) << (8 * b);
    }
    return out;
}

extern "C" __global__ void repack(const unsigned char* source, int rows, uint4* out, int first_tile, int tile_step) {
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    int lane = thread % 32, group = thread / 32 % GROUPS;
    long long tile = thread / 32 / GROUPS;
    if (tile * 16 >= rows) return;
    unsigned* cell = (unsigned*)(out + ((first_tile + tile * tile_step) * GROUPS + group) * Weights<BITS>::CELL);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        unsigned a[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int row = tile * 16 + lane / 4 + 8 * (j & 1);
            a[j] = four(source, row, rows, group * GROUP + 32 * t + 16 * (j >> 1) + 4 * (lane % 4));
        }
        if constexpr (BITS == 2) {
            unsigned word = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) word |= (a[j] & 0x03030303u) << (2 * j);
            cell[lane * 4 + t] = word;
        } else if constexpr (BITS == 4) {
            for (int h = 0; h < 2; ++h)
                cell[(t / 2 * 32 + lane) * 4 + t % 2 * 2 + h] = (a[2 * h] & 0x0F0F0F0Fu) | (a[2 * h + 1] & 0x0F0F0F0Fu) << 4;
        } else {
            for (int j = 0; j < 4; ++j) cell[(t * 32 + lane) * 4 + j] = a[j];
        }
    }
}
