// RMSNorm and int8 quantisation of the rows of a pass, from statistics that the kernel before has left behind.
#pragma once

#include "matrix.cuh"

// Statistics of 16 columns of a row: sum of squares, and largest |x * gain|.
using Stats = float2;

// What turns a row's float x into its int8 level: q = rint((x * gain * inverse) * factor); value = q * step.
struct Levels {
    float inverse, factor, step;
};

DEVICE Levels levels_of(float largest, float inverse) {
    largest = fmaxf(largest * inverse, 1e-5f);
    return {inverse, 127.f * reciprocal(largest), largest * (1.f / 127)};
}

// All lanes of a warp take part. COUNT statistics of one row; SIZE columns; NORMED: RMSNorm comes first.
template <int SIZE, bool NORMED, int COUNT>
DEVICE Levels levels(const Stats* stats, float eps) {
    float squares = 0, largest = 0;
#pragma unroll
    for (int part = 0; part < COUNT; part += 32) {
        if (part + threadIdx.x % 32 >= COUNT) break;
        Stats s = stats[part + threadIdx.x % 32];
        squares += s.x, largest = fmaxf(largest, s.y);
    }
    // Numbers that are not negative are ordered as their bits are.
    largest = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(largest)));
    float inverse = NORMED ? inverse_root(__fmaf_rn(warp_sum(squares), 1.f / SIZE, eps)) : 1.f;
    return levels_of(largest, inverse);
}

DEVICE unsigned quantise4(float4 x, float4 gain, Levels l) {
    auto level = [&](float value, float g) {
        int q = __float2int_rn(((value * g) * l.inverse) * l.factor);
        return (unsigned)(max(-127, min(127, q)) & 0xff);
    };
    return level(x.x, gain.x) | level(x.y, gain.y) << 8 | level(x.z, gain.z) << 16 | level(x.w, gain.w) << 24;
}

// Statistics of 16 columns, one in each lane of a half warp; every lane of it gets them.
DEVICE Stats tile_stats(float x, float gain) {
    float squares = x * x, largest = fabsf(x * gain);
#pragma unroll
    for (int mask = 8; mask > 0; mask >>= 1) {
        squares += __shfl_xor_sync(0xffffffffu, squares, mask);
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
    }
    return make_float2(squares, largest);
}
