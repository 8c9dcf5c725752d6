// Logits of a head of 16-bit floats: RMSNorm, then float dot products.
//
// Constants: INPUTS, a multiple of 4; X_STRIDE, OUT_STRIDE: of a row of the pass in x and logits; VOCAB; PARTS: statistics a
// row has; ROWS of the pass that a block takes: 1, 2, 4 or 8; HEAD: only rows with this head, or 0: with any.
//
// A lane takes every 32nd four inputs, in ascending order, and a butterfly adds the lanes up: an order that INPUTS fixes.
#include "quantise.cuh"

constexpr int THREADS = 256;
constexpr int ENTRIES = 4;                          // of the vocabulary, that a warp takes at a time
constexpr int PADDED = (INPUTS + 127) / 128 * 128;  // floats of a row in shared memory
constexpr int SUMS = ROWS * ENTRIES;

DEVICE bool wanted(const Pass* pass, int row) {
    return row < pass->width && (HEAD ? pass->rows[row].head == HEAD : pass->rows[row].head != HEAD_NONE);
}

// The normed row, or zeros; one warp.
DEVICE void norm_row(float4* to, const float* x, const Stats* stats, const float* gain, float eps, bool exists) {
    const float inverse = exists ? levels<INPUTS, true, PARTS>(stats, eps).inverse : 0.f;
#pragma unroll 4
    for (int quad = threadIdx.x % 32; quad < PADDED / 4; quad += 32) {
        float4 value = make_float4(0, 0, 0, 0);
        if (exists && quad < INPUTS / 4) {
            const float4 v = ((const float4*)x)[quad], g = ((const float4*)gain)[quad];
            value = make_float4(v.x * g.x * inverse, v.y * g.y * inverse, v.z * g.z * inverse, v.w * g.w * inverse);
        }
        to[quad] = value;
    }
}

DEVICE float multiply_four(float4 x, uint2 w, float sum) {
    sum = __fmaf_rn(x.x, from_half(w.x & 0xffff), sum);
    sum = __fmaf_rn(x.y, from_half(w.x >> 16), sum);
    sum = __fmaf_rn(x.z, from_half(w.y & 0xffff), sum);
    return __fmaf_rn(x.w, from_half(w.y >> 16), sum);
}

// Adds every sum up over the lanes. Lanes part the sums among them as they go: lane l ends with sum l / (32 / SUMS).
DEVICE float add_lanes(float (&sums)[SUMS]) {
    int left = SUMS;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        if (left > 1) {
            left /= 2;
            const bool upper = threadIdx.x & mask;
#pragma unroll
            for (int i = 0; i < left; ++i) {
                const float mine = upper ? sums[i + left] : sums[i], other = upper ? sums[i] : sums[i + left];
                sums[i] = mine + __shfl_xor_sync(0xffffffffu, other, mask);
            }
        } else {
            sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], mask);
        }
    }
    return sums[0];
}

// Grid: (blocks that share the vocabulary, rows of the pass / ROWS).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    float_head(const Pass* pass, const half_bits* weights, const float* x, const Stats* stats, const float* gain, float* logits,
               float eps) {
    extern __shared__ float4 rows[];  // [ROWS][PADDED / 4]
    const int first = blockIdx.y * ROWS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    wait_for_previous();
    let_next_start();
    bool any = false;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) any |= wanted(pass, first + row);
    if (!any) return;
    if (warp < ROWS) {
        const long long row = first + warp;
        norm_row(rows + warp * (PADDED / 4), x + row * X_STRIDE, stats + row * PARTS, gain, eps, row < pass->width);
    }
    __syncthreads();
    for (int entry = (blockIdx.x * (THREADS / 32) + warp) * ENTRIES; entry < VOCAB; entry += gridDim.x * (THREADS / 32) * ENTRIES) {
        float sums[SUMS] = {};
#pragma unroll 2
        for (int quad = lane; quad < PADDED / 4; quad += 32) {
            uint2 w[ENTRIES];
#pragma unroll
            for (int e = 0; e < ENTRIES; ++e) {
                const bool inside = quad < INPUTS / 4 && entry + e < VOCAB;
                w[e] = inside ? __ldg((const uint2*)(weights + (long long)(entry + e) * INPUTS) + quad) : make_uint2(0, 0);
            }
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const float4 value = rows[row * (PADDED / 4) + quad];
#pragma unroll
                for (int e = 0; e < ENTRIES; ++e) sums[row * ENTRIES + e] = multiply_four(value, w[e], sums[row * ENTRIES + e]);
            }
        }
        const float sum = add_lanes(sums);
        const int place = lane / (32 / SUMS), row = first + place / ENTRIES, id = entry + place % ENTRIES;
        if (lane % (32 / SUMS) == 0 && id < VOCAB && wanted(pass, row)) logits[(long long)row * OUT_STRIDE + id] = sum;
    }
}
