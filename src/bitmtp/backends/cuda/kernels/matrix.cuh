// Integer weight matrices in the order in which the tensor cores take them.
//
// A matrix is cut into tiles of 16 output rows and groups of 128 inputs. Of a cell (tile, group) lane l of a warp holds
// what mma.m16n8k32 wants of it as its first operand: four instructions (t) of four registers (j), four bytes each. Register
// j of instruction t holds, for row l / 4 + 8 * (j & 1), the inputs 32 t + 16 (j >> 1) + 4 (l % 4) … + 3. Weights of fewer
// than eight bits lie in the top bits of their byte once a shift has brought them there, so a ternary weight enters as
// 64 w and a 4-bit one as 16 w, signed, with nothing to correct but a power of two.
#pragma once

#include "common.cuh"

constexpr int GROUP = 128;  // inputs of a cell

template <int WEIGHT_BITS>
struct Weights {
    static_assert(WEIGHT_BITS == 2 || WEIGHT_BITS == 4 || WEIGHT_BITS == 8, "weights have 2, 4 or 8 bits");
    static constexpr int LOADS = WEIGHT_BITS / 2;               // 16-byte loads a lane needs for a cell
    static constexpr int CELL = LOADS * 32;              // size of a cell in uint4
    static constexpr float UNIT = WEIGHT_BITS == 2 ? 1.f / 64 : WEIGHT_BITS == 4 ? 1.f / 16 : 1.f;  // value of one step of a product

    // The four registers of instruction t from a lane's loads.
    DEVICE static void registers(const uint4* loaded, int t, unsigned (&a)[4]) {
        if constexpr (WEIGHT_BITS == 2) {
            unsigned word = t == 0 ? loaded->x : t == 1 ? loaded->y : t == 2 ? loaded->z : loaded->w;
#pragma unroll
            for (int j = 0; j < 4; ++j) a[j] = (word << (6 - 2 * j)) & 0xC0C0C0C0u;
        } else if constexpr (WEIGHT_BITS == 4) {
            uint4 pair = loaded[t / 2];
            unsigned low = t % 2 ? pair.z : pair.x, high = t % 2 ? pair.w : pair.y;
            a[0] = (low << 4) & 0xF0F0F0F0u, a[1] = low & 0xF0F0F0F0u;
            a[2] = (high << 4) & 0xF0F0F0F0u, a[3] = high & 0xF0F0F0F0u;
        } else {
            a[0] = loaded[t].x, a[1] = loaded[t].y, a[2] = loaded[t].z, a[3] = loaded[t].w;
        }
    }
};

// Which lane, instruction and register hold the four weights of `row` that begin at `input` (a multiple of 4).
struct Place {
    long long cell;
    int lane, t, j;

    DEVICE Place(int row, int input, int groups) {
        cell = (long long)(row / 16) * groups + input / GROUP;
        lane = row % 8 * 4 + input % 16 / 4;
        t = input % GROUP / 32;
        j = input % 32 / 16 * 2 + row % 16 / 8;
    }
};

// Four consecutive weights of a row, as integers.
template <int WEIGHT_BITS>
DEVICE void weights_at(const uint4* matrix, int row, int input, int groups, int (&w)[4]) {
    Place place(row, input, groups);
    const unsigned* cell = (const unsigned*)(matrix + place.cell * Weights<WEIGHT_BITS>::CELL);
    unsigned word;
    if constexpr (WEIGHT_BITS == 2) {
        word = cell[place.lane * 4 + place.t] << (6 - 2 * place.j);
    } else if constexpr (WEIGHT_BITS == 4) {
        word = cell[(place.t / 2 * 32 + place.lane) * 4 + place.t % 2 * 2 + place.j / 2] << (place.j % 2 ? 0 : 4);
    } else {
        word = cell[(place.t * 32 + place.lane) * 4 + place.j];
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) w[b] = (int)(signed char)(word >> (8 * b)) >> (8 - WEIGHT_BITS);
}

// int8 activations of up to eight rows ("tokens"), in the order of the second operand: of a cell (8 tokens, group), lane l
// holds two registers an instruction: token l / 4, inputs 32 t + 16 r + 4 (l % 4) … + 3.
constexpr int ACTIVATION_CELL = 64;  // size in uint4: instructions 0 and 1 of all lanes, then 2 and 3

DEVICE int activation_word(int token, int input, int groups) {  // index of the 4-byte word that holds input … + 3
    int lane = token % 8 * 4 + input % 16 / 4, t = input % GROUP / 32, r = input % 32 / 16;
    return ((token / 8 * groups + input / GROUP) * ACTIVATION_CELL + t / 2 * 32 + lane) * 4 + t % 2 * 2 + r;
}

DEVICE void multiply(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
