// Rows of a pass: their embedding, and quantisation as a kernel of its own (for passes so wide that doing it in every block
// of a product would read more than it saves).
//
// Constants: INPUTS; X_STRIDE; for `quantise` NORM, PARTS and STEP_INPUTS: inputs of a step, or 0: all; for `embed`
// EMBEDDING_BITS 2, 4, 8 or 16 and SCALE_GROUPS: scales a row has (padded to whole cells), or 0: one.
#include "quantise.cuh"

constexpr int GROUPS = (INPUTS + GROUP - 1) / GROUP;

#ifdef NORM
// Factor and step of this thread's four inputs, which it shares with its neighbours.
DEVICE Levels group_levels(float4 x, float4 g, Levels row) {
    float largest = fmaxf(fmaxf(fabsf(x.x * g.x), fabsf(x.y * g.y)), fmaxf(fabsf(x.z * g.z), fabsf(x.w * g.w)));
#pragma unroll
    for (int mask = STEP_INPUTS / 8; mask > 0; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
    return levels_of(largest, row.inverse);
}

// Grid: (blocks of 1,024 columns, rows of the pass); 256 threads. Columns behind INPUTS become zeros.
extern "C" __global__ void __launch_bounds__(256)
    quantise(const Pass* pass, const float* x, const Stats* stats, const float* gain, unsigned* out, float* steps, float eps) {
    __shared__ Levels shared;
    int row = blockIdx.y, input = (blockIdx.x * 256 + threadIdx.x) * 4;
    float4 g = make_float4(1, 1, 1, 1);
    if (NORM && input < INPUTS) g = *(const float4*)(gain + input);
    let_next_start();  // this kernel is too short to hide the next one's weights: they may come while the one before runs
    wait_for_previous();
    if (row >= pass->width) return;
    float4 value = make_float4(0, 0, 0, 0);
    if (input < INPUTS) value = *(const float4*)(x + (long long)row * X_STRIDE + input);
    if (threadIdx.x < 32) {
        Levels l = levels<INPUTS, NORM, PARTS>(stats + row * PARTS, eps);
        if (threadIdx.x == 0) {
            shared = l;
            if (STEP_INPUTS == 0 && blockIdx.x == 0) steps[row] = l.step;
        }
    }
    __syncthreads();
    Levels own = shared;
#if STEP_INPUTS
    own = group_levels(value, g, shared);
    if (input % STEP_INPUTS == 0 && input < GROUPS * GROUP) steps[(row * GROUPS * GROUP + input) / STEP_INPUTS] = own.step;
#endif
    if (input < GROUPS * GROUP) out[activation_word(row, input, GROUPS)] = quantise4(value, g, own);
}
#endif

#ifdef EMBEDDING_BITS
DEVICE float4 embedding(const void* table, const float* scale, int token, int input) {
#if EMBEDDING_BITS == 16
    const half_bits* h = (const half_bits*)table + (long long)token * INPUTS + input;
    return make_float4(from_half(h[0]), from_half(h[1]), from_half(h[2]), from_half(h[3]));
#else
    int w[4];
    weights_at<EMBEDDING_BITS>((const uint4*)table, token, input, GROUPS, w);
    constexpr int COVERED = SCALE_GROUPS ? GROUPS * GROUP / SCALE_GROUPS : 1;  // inputs of a scale
    float s = SCALE_GROUPS ? scale[((long long)(token / 16) * SCALE_GROUPS + input / COVERED) * 16 + token % 16] : scale[token];
    return make_float4(w[0] * s, w[1] * s, w[2] * s, w[3] * s);
#endif
}

// One block of 256 threads a row of the pass: x, and statistics for the first norm.
extern "C" __global__ void __launch_bounds__(256)
    embed(const Pass* pass, const void* table, const float* scale, const float* masks, const float* gain, float* x, Stats* stats) {
    __shared__ float4 values[(INPUTS + 3) / 4];
    wait_for_previous();
    let_next_start();
    int row = blockIdx.x;
    if (row >= pass->width) return;
    int token = pass->rows[row].token;
    for (int quad = threadIdx.x; quad < INPUTS / 4; quad += 256) {
        float4 value = token < 0 ? *(const float4*)(masks + (long long)(-token - 1) * INPUTS + quad * 4)
                                 : embedding(table, scale, token, quad * 4);
        values[quad] = value;
        *(float4*)(x + (long long)row * X_STRIDE + quad * 4) = value;
    }
    __syncthreads();
    constexpr int STAT_TILES = (INPUTS + 15) / 16;
    for (int tile = threadIdx.x / 16; tile < (STAT_TILES + 15) / 16 * 16; tile += 16) {
        int column = tile * 16 + threadIdx.x % 16;
        bool valid = column < INPUTS;
        Stats s = tile_stats(valid ? ((const float*)values)[column] : 0.f, valid ? gain[column] : 0.f);
        if (tile < STAT_TILES && threadIdx.x % 16 == 0) stats[row * STAT_TILES + tile] = s;
    }
}
#endif
