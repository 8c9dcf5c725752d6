// The W·A8 product on int8 tensor cores, with what comes before it (norm, quantisation) and after it (scale, bias,
// activation function, residual sum) in the same kernel.
//
// Constants: BITS of a weight; INPUTS, OUTPUTS; TILE: rows of the pass, 8, 16, 32 or 64 (8: width 1 costs what width 8 costs);
// KWARPS of the 8 warps share the inputs of one tile of outputs among them; TILES of 16 outputs per warp and batch;
// SCALE_GROUPS: scales an output has, or 0: one, applied to the integer sum; ROLE below; FUSED: how many rows are quantised here, 1 to 8, or 0:
// `quantise` has done it; NORM; BIAS; PARTS: statistics a row has on entry.
// X_STRIDE, OUT_STRIDE: of a row of the pass in x and out.
//
// Sums are exact integers, or, with scales per group, floats in an order that INPUTS and KWARPS fix: no width and no
// neighbour changes a bit.
#include "quantise.cuh"

#define STORE 0     // out = y
#define RESIDUAL 1  // out += y, and statistics of the sum
#define SILU 2      // tiles come in pairs, gate and up: out = silu(gate) * up, and statistics
#define RELU2 3     // out = max(gate, 0)^2 * up, and statistics

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int GROUPS = (INPUTS + GROUP - 1) / GROUP;
constexpr int SLICE = (GROUPS + KWARPS - 1) / KWARPS;  // groups of one warp
constexpr int RWARPS = WARPS / KWARPS;
constexpr int BATCH = RWARPS * TILES;  // tiles of one block at a time
constexpr int ROW_TILES = (OUTPUTS + 15) / 16;
constexpr int BATCHES = (ROW_TILES + BATCH - 1) / BATCH;
constexpr int NT = TILE / 8;
constexpr bool GATED = ROLE == SILU || ROLE == RELU2;
constexpr bool GROUPED = SCALE_GROUPS > 0;
constexpr int OUT = GATED ? OUTPUTS / 2 : OUTPUTS;
constexpr int STRIDE = BATCH * 16 + 4;  // of a token in the reduction; the 4 keeps banks apart
using W = Weights<BITS>;

static_assert(!GATED || TILES % 2 == 0, "a pair of gate and up is reduced together");

struct Arguments {
    const uint4* weights;
    const float* scale;  // [OUTPUTS], or [ROW_TILES][SCALE_GROUPS][16]
    const float* bias;
    const float* x;       // [MAX_WIDTH][X_STRIDE], to be quantised here
    const Stats* stats;   // [MAX_WIDTH][PARTS] of x
    const float* gain;    // [INPUTS] of the norm before the product
    const uint4* levels;  // int8 activations, if quantised before
    const float* steps;   // [MAX_WIDTH], likewise
    float* out;           // [MAX_WIDTH][OUT_STRIDE]
    Stats* out_stats;     // [MAX_WIDTH][OUT / 16]
    const float* out_gain;  // of the norm after the product, or null
    float eps;
};

struct Shared {
    float* sums;      // [KWARPS][TILE][STRIDE]; integers if the scale is not per group
    Levels* levels;   // [TILE]
    uint4* activations;
};

// What a lane holds of one cell: its weights, and the scales of its two rows.
struct Cell {
    uint4 weights[W::LOADS];
    float2 scale;
};

DEVICE void load_cell(Cell& c, const Arguments& a, int tile, int group) {
    int lane = threadIdx.x % 32;
    if (tile >= ROW_TILES || group >= GROUPS) return;
    const uint4* cell = a.weights + ((long long)tile * GROUPS + group) * W::CELL + lane;
#pragma unroll
    for (int n = 0; n < W::LOADS; ++n) c.weights[n] = load_streaming(cell + n * 32);
    if constexpr (GROUPED) {
        constexpr int PER = GROUPS / (GROUPED ? SCALE_GROUPS : 1);
        const float* scale = a.scale + ((long long)tile * SCALE_GROUPS + group / PER) * 16 + lane / 4;
        c.scale = make_float2(__ldg(scale), __ldg(scale + 8));
    }
}

// The cells of one batch, all loads in flight at once. A wide pass has work enough to hide them, and no registers for them.
constexpr bool AHEAD = NT <= 2;
struct Loaded {
    Cell cells[AHEAD ? TILES * SLICE : 1];
};

DEVICE int first_tile(int batch) { return batch * BATCH + threadIdx.x / 32 / KWARPS * TILES; }
DEVICE int first_group() { return threadIdx.x / 32 % KWARPS * SLICE; }

DEVICE void load(Loaded& l, const Arguments& a, int batch) {
    if constexpr (AHEAD) {
#pragma unroll
        for (int i = 0; i < TILES * SLICE; ++i)
            load_cell(l.cells[i], a, first_tile(batch) + i / SLICE, first_group() + i % SLICE);
    }
}

// Norm and quantisation of FUSED rows into shared memory, by the whole block. Rows are asked for before their statistics
// have been added up, as many as registers hold.
#if FUSED
DEVICE void quantise_rows(const Arguments& a, const Shared& shared) {
    constexpr int QUADS = GROUPS * GROUP / 4;
    constexpr int EACH = (QUADS + THREADS - 1) / THREADS;  // quads of a row per thread
    constexpr int STEP = EACH >= 8 ? 1 : FUSED < 8 / EACH ? FUSED : 8 / EACH;  // rows at a time
    float4 x[STEP][EACH], gain[EACH];
    auto fetch = [&](int first) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            int input = (i * THREADS + threadIdx.x) * 4;
            bool inside = input < INPUTS;
            if (first == 0) gain[i] = NORM && inside ? *(const float4*)(a.gain + input) : make_float4(1, 1, 1, 1);
#pragma unroll
            for (int r = 0; r < STEP; ++r) {
                x[r][i] = make_float4(0, 0, 0, 0);
                if (inside && first + r < FUSED) x[r][i] = *(const float4*)(a.x + (long long)(first + r) * X_STRIDE + input);
            }
        }
    };
    fetch(0);
    int warp = threadIdx.x / 32;
    if (warp < FUSED) {
        Levels l = levels<INPUTS, NORM, PARTS>(a.stats + warp * PARTS, a.eps);
        if (threadIdx.x % 32 == 0) shared.levels[warp] = l;
    }
    __syncthreads();
#pragma unroll
    for (int first = 0; first < FUSED; first += STEP) {
        if (first) fetch(first);
#pragma unroll
        for (int r = 0; r < STEP; ++r) {
            if (first + r >= FUSED) break;
            Levels l = shared.levels[first + r];
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                int quad = i * THREADS + threadIdx.x;
                if (quad < QUADS)
                    ((unsigned*)shared.activations)[activation_word(first + r, quad * 4, GROUPS)] = quantise4(x[r][i], gain[i], l);
            }
        }
    }
}
#endif

// What a lane has of a tile's sums: integers, or floats once scales per group have been applied.
struct Sums {
    int total[NT][4];
    float scaled[NT][4];
};

// Activations of this warp's inputs, kept in registers where several tiles need them and they fit.
constexpr bool HELD = TILES > 1 && SLICE * NT <= 4;
struct Activations {
    const uint4* memory;
    uint4 held[HELD ? SLICE * NT * 2 : 1];

    DEVICE explicit Activations(const uint4* from) : memory(from + threadIdx.x % 32) {
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < SLICE * NT * 2; ++i) held[i] = load(i / 2 % NT, i / 2 / NT, i % 2);
        }
    }
    DEVICE uint4 load(int n, int s, int half) const {
        int group = first_group() + s;
        if (group >= GROUPS) return make_uint4(0, 0, 0, 0);
        return memory[(n * GROUPS + group) * ACTIVATION_CELL + half * 32];
    }
    DEVICE uint4 operator()(int n, int s, int half) const {
        if constexpr (HELD) return held[(s * NT + n) * 2 + half];
        return load(n, s, half);
    }
};

DEVICE void multiply_cell(Sums& sums, const Cell& c, const Activations& activations, int s) {
    unsigned a[4][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) W::registers(c.weights, t, a[t]);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        uint4 first = activations(n, s, 0), second = activations(n, s, 1);
        multiply(sums.total[n], a[0], first.x, first.y);
        multiply(sums.total[n], a[1], first.z, first.w);
        multiply(sums.total[n], a[2], second.x, second.y);
        multiply(sums.total[n], a[3], second.z, second.w);
        if constexpr (GROUPED) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sums.scaled[n][i] = __fmaf_rn((float)sums.total[n][i], i < 2 ? c.scale.x : c.scale.y, sums.scaled[n][i]);
                sums.total[n][i] = 0;
            }
        }
    }
}

// One tile of outputs, this warp's share of the inputs: into the reduction.
DEVICE void multiply_tile(const Loaded& l, const Arguments& a, int tile, int i, const Activations& activations,
                          float* out) {
    Sums sums = {};
    if constexpr (AHEAD) {
#pragma unroll
        for (int s = 0; s < SLICE; ++s)
            if (first_group() + s < GROUPS) multiply_cell(sums, l.cells[i * SLICE + s], activations, s);
    } else {
#pragma unroll 2
        for (int s = 0; s < SLICE; ++s) {
            if (first_group() + s >= GROUPS) break;
            Cell cell = {};
            load_cell(cell, a, tile, first_group() + s);
            multiply_cell(sums, cell, activations, s);
        }
    }
    int lane = threadIdx.x % 32, part = threadIdx.x / 32 % KWARPS;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            int token = n * 8 + lane % 4 * 2 + c % 2, row = lane / 4 + c / 2 * 8;
            float value = GROUPED ? sums.scaled[n][c] : __int_as_float(sums.total[n][c]);
            out[(part * TILE + token) * STRIDE + row] = value;
        }
    }
}

// What the end of a product needs besides the sums, for one output of one row of the pass.
struct Ending {
    float scale, up_scale;  // of the integer sums
    float bias;
    float gain;      // of the next norm
    float residual;  // what `out` holds
};

// Half a warp takes 16 outputs (or 16 pairs of gate and up) of one row of the pass at a time: a unit. Rows come in order, so
// that a narrow pass ends early.
constexpr int UNITS = BATCH / (GATED ? 2 : 1);  // of a row
constexpr int ROUNDS = (UNITS * TILE + THREADS / 16 - 1) / (THREADS / 16);

struct Unit {
    int token, tile, output, column;  // tile: of the batch; output: column of `out`
    bool valid;

    DEVICE Unit(int round, int batch, int width) {
        int unit = round * (THREADS / 16) + threadIdx.x / 16;
        token = unit / UNITS, tile = unit % UNITS * (GATED ? 2 : 1);
        column = threadIdx.x % 16;
        int row_tile = batch * BATCH + tile;
        output = (GATED ? row_tile / 2 : row_tile) * 16 + column;
        valid = token < width && row_tile < ROW_TILES && output < OUT;
    }
};

// Nothing of this was written by the kernel before this one: it may come before that kernel has ended.
DEVICE Ending ending(const Arguments& a, const Unit& u) {
    Ending e = {1, 1, 0, 1, 0};
    if (!u.valid) return e;
    int row = GATED ? u.output / 16 * 32 + u.column : u.output;  // of the matrix
    if constexpr (!GROUPED) {
        e.scale = __ldg(a.scale + row);
        if constexpr (GATED) e.up_scale = __ldg(a.scale + row + 16);
    }
    if constexpr (BIAS) e.bias = __ldg(a.bias + row);
    if constexpr (ROLE != STORE) e.gain = a.out_gain ? __ldg(a.out_gain + u.output) : 1.f;
    if constexpr (ROLE == RESIDUAL) e.residual = a.out[(long long)u.token * OUT_STRIDE + u.output];
    return e;
}

// What all warps together have found for one output of one row of the pass.
DEVICE float reduce(const Shared& shared, int token, int row, float scale) {
    const float* sums = shared.sums + token * STRIDE + row;
    float y;
    if constexpr (GROUPED) {
        y = sums[0];
#pragma unroll
        for (int part = 1; part < KWARPS; ++part) y += sums[part * TILE * STRIDE];
    } else {
        int total = 0;
#pragma unroll
        for (int part = 0; part < KWARPS; ++part) total += __float_as_int(sums[part * TILE * STRIDE]);
        y = (float)total * scale;
    }
    return (y * W::UNIT) * shared.levels[token].step;
}

DEVICE void finish(const Arguments& a, const Shared& shared, const Unit& u, const Ending& e) {
    float value = 0;
    if (u.valid) {
        value = reduce(shared, u.token, u.tile * 16 + u.column, e.scale) + (BIAS ? e.bias : 0);
        if constexpr (GATED) {
            float up = reduce(shared, u.token, u.tile * 16 + 16 + u.column, e.up_scale);
            float positive = fmaxf(value, 0.f);
            value = ROLE == SILU ? __fdiv_rn(value, 1.f + exp_(-value)) * up : (positive * positive) * up;
        }
        if constexpr (ROLE == RESIDUAL) value += e.residual;
        a.out[(long long)u.token * OUT_STRIDE + u.output] = value;
    }
    if constexpr (ROLE != STORE) {
        Stats stats = tile_stats(value, e.gain);
        if (u.valid && u.column == 0) a.out_stats[u.token * ((OUT + 15) / 16) + u.output / 16] = stats;
    }
}

// On compute capability 9.0 two blocks share a multiprocessor: the next kernel's weights come while this one ends. Earlier
// cards do not overlap kernels, and for later ones the assembler would have to spill.
#if __CUDA_ARCH__ == 900
constexpr int BLOCKS = NT <= 2 ? 2 : 1;
#else
constexpr int BLOCKS = 1;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    product(const Pass* pass, const uint4* weights, const float* scale, const float* bias, const float* x, const Stats* stats,
            const float* gain, const uint4* levels, const float* steps, float* out, Stats* out_stats, const float* out_gain,
            float eps) {
    Arguments a{weights, scale, bias, x, stats, gain, levels, steps, out, out_stats, out_gain, eps};
    extern __shared__ uint4 memory[];
    Shared shared;
    shared.activations = memory;
    shared.sums = (float*)(memory + (FUSED ? GROUPS * ACTIVATION_CELL * NT : 0));
    shared.levels = (Levels*)(shared.sums + KWARPS * TILE * STRIDE);

    Loaded loaded;
    int batch = blockIdx.x;
    load(loaded, a, batch);  // weights do not change: they may come while the kernel before still runs
    // The kernel before has waited for the one before it before it let this one start: what is older may be read as well.
    int width = pass->width;
    constexpr bool EARLY = ROUNDS <= 2;  // registers for the endings of the first batch
    Ending endings[EARLY ? ROUNDS : 1];
    if constexpr (EARLY) {
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) endings[round] = ending(a, Unit(round, batch, width));
    }
    wait_for_previous();
    let_next_start();
#if FUSED
    quantise_rows(a, shared);
#else
    for (int row = threadIdx.x; row < width; row += THREADS) shared.levels[row].step = a.steps[row];
#endif
    __syncthreads();
    Activations activations(FUSED ? shared.activations : a.levels);
    int warp = threadIdx.x / 32;
    while (true) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            float* out = shared.sums + (warp / KWARPS * TILES + i) * 16;
            multiply_tile(loaded, a, first_tile(batch) + i, i, activations, out);
        }
        if (batch + gridDim.x < BATCHES) load(loaded, a, batch + gridDim.x);
        __syncthreads();
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            if ((round * (THREADS / 16) + warp * 2) / UNITS >= width) break;  // the whole warp has nothing left
            Unit unit(round, batch, width);
            bool early = EARLY && batch == blockIdx.x;
            finish(a, shared, unit, early ? endings[EARLY ? round : 0] : ending(a, unit));
        }
        batch += gridDim.x;
        if (batch >= BATCHES) break;
        __syncthreads();
    }
}
