// The W·A8 product on int8 tensor cores, with what comes before it (norm, quantisation) and after it (scale, bias,
// activation function, residual sum) in the same kernel.
//
// Constants: BITS of a weight; INPUTS, OUTPUTS; TILE: rows of the pass, 8, 16, 32 or 64 (8: width 1 costs what width 8 costs);
// KWARPS of the 8 warps share the inputs of one tile of outputs among them; TILES of 16 outputs per warp and batch; SCALE_GROUPS:
// scales an output has, padded to whole cells, or 0: one, applied to the integer sum; ROLE below; FUSED: how many rows are
// quantised here, 1 to 8, or 0: `quantise` has done it; CLUSTER: 1, or KWARPS blocks that share the inputs among them instead of
// the warps of each, so that a block quantises its own only; NORM; BIAS; PARTS: statistics a row has on entry; HASTY: the next
// kernel reads nothing before its wait that the kernel before this one writes, so it may start at once; STEP_GROUPS: steps that
// a row of activations has, padded to whole cells (FUSED is 0 then), or 0: one; X_STRIDE, OUT_STRIDE: of a row of the pass in x
// and out; HEAD: only rows with this head are stored, or 0: all.
//
// Sums are exact integers, or, with scales per group, floats in an order that INPUTS and KWARPS fix: no width and no
// neighbour changes a bit.
#include "cluster.cuh"
#include "quantise.cuh"

#define STORE 0     // out = y
#define RESIDUAL 1  // out += y, and statistics of the sum
#define SILU 2      // tiles come in pairs, gate and up: out = silu(gate) * up, and statistics
#define RELU2 3     // out = max(gate, 0)^2 * up, and statistics

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int GROUPS = (INPUTS + GROUP - 1) / GROUP;
constexpr int SLICE = (GROUPS + KWARPS - 1) / KWARPS;  // groups of one warp
constexpr bool SPLIT = CLUSTER > 1;
constexpr int HELD_GROUPS = SPLIT ? SLICE : GROUPS;    // activations of a block
constexpr int RWARPS = WARPS / KWARPS;
constexpr int BATCH = RWARPS * TILES;  // tiles of one block at a time
constexpr int ROW_TILES = (OUTPUTS + 15) / 16;
constexpr int BATCHES = (ROW_TILES + BATCH - 1) / BATCH;
constexpr int NT = TILE / 8;
constexpr bool GATED = ROLE == SILU || ROLE == RELU2;
constexpr bool GROUPED = SCALE_GROUPS > 0 || STEP_GROUPS > 0;  // sums are floats
constexpr int CELL_SCALES = SCALE_GROUPS > GROUPS ? SCALE_GROUPS / GROUPS : 1;  // scales of an output in a cell: 1, 2 or 4
constexpr int CELL_STEPS = STEP_GROUPS > GROUPS ? STEP_GROUPS / GROUPS : 1;     // steps of a row of the pass in it, likewise
constexpr int CELL_PARTS = CELL_SCALES > CELL_STEPS ? CELL_SCALES : CELL_STEPS;
static_assert(!(STEP_GROUPS && FUSED), "steps of groups are `quantise`'s");
constexpr int OUT = GATED ? OUTPUTS / 2 : OUTPUTS;
constexpr int STRIDE = BATCH * 16 + 4;  // of a token in the reduction; the 4 keeps banks apart
using W = Weights<BITS>;

static_assert(!GATED || TILES % 2 == 0, "a pair of gate and up is reduced together");

struct Arguments {
    const Pass* pass;
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
    float* outgoing;  // [WARPS][TILES][TILE][16] if SPLIT: sums for other blocks
    Levels* levels;   // [TILE]
    Mailbox* mailbox;
    uint4* activations;
};

// What a lane holds of one cell: its weights, and the scales of its two rows.
struct Cell {
    uint4 weights[W::LOADS];
    float2 scales[CELL_SCALES];
};

DEVICE void load_cell(Cell& c, const Arguments& a, int tile, int group) {
    int lane = threadIdx.x % 32;
    if (tile >= ROW_TILES || group >= GROUPS) return;
    const uint4* cell = a.weights + ((long long)tile * GROUPS + group) * W::CELL + lane;
#pragma unroll
    for (int n = 0; n < W::LOADS; ++n) c.weights[n] = load_streaming(cell + n * 32);
    if constexpr (SCALE_GROUPS > 0) {
        constexpr int PER = GROUPS * CELL_SCALES / (SCALE_GROUPS ? SCALE_GROUPS : 1);  // cells of a scale
        const float* scale = a.scale + ((long long)tile * SCALE_GROUPS + group / PER * CELL_SCALES) * 16 + lane / 4;
#pragma unroll
        for (int n = 0; n < CELL_SCALES; ++n) c.scales[n] = make_float2(__ldg(scale + n * 16), __ldg(scale + n * 16 + 8));
    }
}

// The cells of one batch, all loads in flight at once. A wide pass has work enough to hide them, and no registers for them.
constexpr bool AHEAD = NT <= 2;
struct Loaded {
    Cell cells[AHEAD ? TILES * SLICE : 1];
};

static_assert(!SPLIT || (KWARPS == WARPS && CLUSTER == WARPS && NT == 1 && FUSED), "a block takes the place of a warp");

// Whose outputs a warp computes, and from which inputs. If SPLIT, warp w of block r does what warp r of block w would do.
DEVICE int first_tile(int batch) {
    int warp = threadIdx.x / 32;
    return SPLIT ? (batch - cluster_rank() + warp) * TILES : batch * BATCH + warp / KWARPS * TILES;
}
DEVICE int part() { return SPLIT ? cluster_rank() : threadIdx.x / 32 % KWARPS; }
DEVICE int first_group() { return part() * SLICE; }

DEVICE void load(Loaded& l, const Arguments& a, int batch) {
    if constexpr (AHEAD) {
#pragma unroll
        for (int i = 0; i < TILES * SLICE; ++i)
            load_cell(l.cells[i], a, first_tile(batch) + i / SLICE, first_group() + i % SLICE);
    }
}

// Norm and quantisation of FUSED rows into shared memory, of all inputs or this block's. Rows are asked for before their
// statistics have been added up.
#if FUSED
struct Quantiser {
    static constexpr int QUADS = HELD_GROUPS * GROUP / 4;  // of a row
    static constexpr int EACH = (QUADS * FUSED + THREADS - 1) / THREADS;
    static constexpr int MOST = NORM ? 8 : 10;  // in flight at a time
    static constexpr int STEP = EACH < MOST ? EACH : MOST;
    float4 gain[STEP];

    DEVICE static int first() { return SPLIT ? first_group() * GROUP : 0; }  // input of this block
    DEVICE static int row(int i) { return (i * THREADS + threadIdx.x) / QUADS; }
    DEVICE static int input(int i) { return first() + (i * THREADS + threadIdx.x) % QUADS * 4; }

    DEVICE void load_gains(const Arguments& a, int from) {
#pragma unroll
        for (int i = 0; i < STEP; ++i) {
            bool inside = row(from + i) < FUSED && input(from + i) < INPUTS;
            gain[i] = NORM && inside ? __ldg((const float4*)(a.gain + input(from + i))) : make_float4(1, 1, 1, 1);
        }
    }

    // Before the kernel before this one has ended.
    DEVICE void prepare(const Arguments& a, const Shared& shared) {
        load_gains(a, 0);
        if constexpr (SPLIT) {
            if (threadIdx.x == 0) shared.mailbox->expect((CLUSTER - 1) * TILES * 16 * TILE * 4);
            cluster_arrive();
            cluster_wait();
        }
    }

    DEVICE void load_rows(const Arguments& a, float4 (&x)[STEP], int from) const {
#pragma unroll
        for (int i = 0; i < STEP; ++i) {
            bool inside = row(from + i) < FUSED && input(from + i) < INPUTS;
            x[i] = inside ? *(const float4*)(a.x + (long long)row(from + i) * X_STRIDE + input(from + i)) : make_float4(0, 0, 0, 0);
        }
    }

    DEVICE void run(const Arguments& a, const Shared& shared) {
        float4 x[STEP];
        load_rows(a, x, 0);
        int warp = threadIdx.x / 32;
        if (warp < FUSED) {
            Levels l = levels<INPUTS, NORM, PARTS>(a.stats + warp * PARTS, a.eps);
            if (threadIdx.x % 32 == 0) shared.levels[warp] = l;
        }
        __syncthreads();
#pragma unroll
        for (int from = 0; from < EACH; from += STEP) {
            if (from) load_gains(a, from), load_rows(a, x, from);
#pragma unroll
            for (int i = 0; i < STEP; ++i) {
                if (from + i >= EACH || row(from + i) >= FUSED || input(from + i) >= GROUPS * GROUP) continue;
                unsigned* word = (unsigned*)shared.activations + activation_word(row(from + i), input(from + i) - first(), HELD_GROUPS);
                *word = quantise4(x[i], gain[i], shared.levels[row(from + i)]);
            }
        }
    }
};
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
    const float* steps;
    uint4 held[HELD ? SLICE * NT * 2 : 1];

    DEVICE Activations(const uint4* from, const float* steps) : memory(from + threadIdx.x % 32), steps(steps) {
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < SLICE * NT * 2; ++i) held[i] = load(i / 2 % NT, i / 2 / NT, i % 2);
        }
    }
    DEVICE uint4 load(int n, int s, int half) const {
        if (first_group() + s >= GROUPS) return make_uint4(0, 0, 0, 0);
        int group = SPLIT ? s : first_group() + s;
        return memory[(n * HELD_GROUPS + group) * ACTIVATION_CELL + half * 32];
    }
    // Of this lane's two rows of the pass, in a part of a cell.
    DEVICE float2 step(int n, int s, int part) const {
        if constexpr (STEP_GROUPS == 0) return make_float2(1, 1);
        constexpr int PER = GROUPS * CELL_STEPS / (STEP_GROUPS ? STEP_GROUPS : 1);  // cells of a step
        const float* own = steps + (n * 8 + threadIdx.x % 4 * 2) * STEP_GROUPS;
        int group = (first_group() + s) / PER * CELL_STEPS + part * CELL_STEPS / CELL_PARTS;
        return make_float2(own[group], own[STEP_GROUPS + group]);
    }
    DEVICE uint4 operator()(int n, int s, int half) const {
        if constexpr (HELD) return held[(s * NT + n) * 2 + half];
        return load(n, s, half);
    }
};

// What has been summed since the last time, times scale and step.
DEVICE void scale_sums(Sums& sums, int n, float2 scale, float2 step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float sum = (float)sums.total[n][i] * (i % 2 ? step.y : step.x);
        sums.scaled[n][i] = __fmaf_rn(sum, i < 2 ? scale.x : scale.y, sums.scaled[n][i]);
        sums.total[n][i] = 0;
    }
}

DEVICE void multiply_cell(Sums& sums, const Cell& c, const Activations& activations, int s) {
    unsigned a[4][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) W::registers(c.weights, t, a[t]);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        uint4 first = activations(n, s, 0), second = activations(n, s, 1);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            uint4 half = t < 2 ? first : second;
            multiply(sums.total[n], a[t], t % 2 ? half.z : half.x, t % 2 ? half.w : half.y);
            if constexpr (GROUPED) {
                if ((t + 1) % (4 / CELL_PARTS)) continue;
                float2 scale = SCALE_GROUPS ? c.scales[t * CELL_SCALES / 4] : make_float2(1, 1);
                scale_sums(sums, n, scale, activations.step(n, s, t * CELL_PARTS / 4));
            }
        }
    }
}

// Cells at a time. For later cards than compute capability 9.0 the assembler would spill two of the widest passes.
#if __CUDA_ARCH__ == 900
constexpr int UNROLLED = 2;
#else
constexpr int UNROLLED = NT < 8 ? 2 : 1;
#endif

// One tile of outputs, this warp's share of the inputs: into the reduction, token by token, `stride` floats apart.
DEVICE void multiply_tile(const Loaded& l, const Arguments& a, int tile, int i, const Activations& activations,
                          float* out, int stride) {
    Sums sums = {};
    if constexpr (AHEAD) {
#pragma unroll
        for (int s = 0; s < SLICE; ++s)
            if (first_group() + s < GROUPS) multiply_cell(sums, l.cells[i * SLICE + s], activations, s);
    } else {
#pragma unroll UNROLLED
        for (int s = 0; s < SLICE; ++s) {
            if (first_group() + s >= GROUPS) break;
            Cell cell = {};
            load_cell(cell, a, tile, first_group() + s);
            multiply_cell(sums, cell, activations, s);
        }
    }
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            int token = n * 8 + lane % 4 * 2 + c % 2, row = lane / 4 + c / 2 * 8;
            out[token * stride + row] = GROUPED ? sums.scaled[n][c] : __int_as_float(sums.total[n][c]);
        }
    }
}

// Where the sums of this warp's i-th tile go within this block.
DEVICE float* place(const Shared& shared, int i) {
    int warp = threadIdx.x / 32;
    return shared.sums + part() * TILE * STRIDE + ((SPLIT ? 0 : warp / KWARPS * TILES) + i) * 16;
}

// All tiles of this warp in a batch. If SPLIT, sums of tiles that another block finishes go to it, 16 bytes a lane.
DEVICE void multiply_tiles(const Loaded& l, const Arguments& a, int batch, const Activations& activations, const Shared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool away = SPLIT && warp != cluster_rank();
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        float* own = place(shared, i);
        float* out = away ? shared.outgoing + (warp * TILES + i) * TILE * 16 : own;
        multiply_tile(l, a, first_tile(batch) + i, i, activations, out, away ? 16 : STRIDE);
        if (!away) continue;
        __syncwarp();
        shared.mailbox->send((const uint4*)(own + lane / 4 * STRIDE + lane % 4 * 4), ((const uint4*)out)[lane], warp);
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
    if constexpr (SCALE_GROUPS == 0) {
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
        if (!SCALE_GROUPS) y *= scale;
    } else {
        int total = 0;
#pragma unroll
        for (int part = 0; part < KWARPS; ++part) total += __float_as_int(sums[part * TILE * STRIDE]);
        y = (float)total * scale;
    }
    return STEP_GROUPS ? y * W::UNIT : (y * W::UNIT) * shared.levels[token].step;
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
        if (!HEAD || a.pass->rows[u.token].head == HEAD) a.out[(long long)u.token * OUT_STRIDE + u.output] = value;
    }
    if constexpr (ROLE != STORE) {
        Stats stats = tile_stats(value, e.gain);
        if (u.valid && u.column == 0) a.out_stats[u.token * ((OUT + 15) / 16) + u.output / 16] = stats;
    }
}

// On compute capability 9.0 blocks of two kernels share a multiprocessor: the next kernel's weights come while this one ends.
// Earlier cards do not overlap kernels, and for later ones the assembler would have to spill.
#if __CUDA_ARCH__ == 900
constexpr int BLOCKS = NT <= 2 ? 2 : 1;
#else
constexpr int BLOCKS = 1;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    product(const Pass* pass, const uint4* weights, const float* scale, const float* bias, const float* x, const Stats* stats,
            const float* gain, const uint4* levels, const float* steps, float* out, Stats* out_stats, const float* out_gain,
            float eps) {
    Arguments a{pass, weights, scale, bias, x, stats, gain, levels, steps, out, out_stats, out_gain, eps};
    extern __shared__ uint4 memory[];
    Shared shared;
    shared.activations = memory;
    shared.sums = (float*)(memory + (FUSED ? HELD_GROUPS * ACTIVATION_CELL * NT : 0));
    shared.outgoing = shared.sums + KWARPS * TILE * STRIDE;
    shared.levels = (Levels*)(shared.outgoing + (SPLIT ? WARPS * TILES * TILE * 16 : 0));
    shared.mailbox = (Mailbox*)(shared.levels + TILE);

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
    if constexpr (HASTY) let_next_start();
#if FUSED
    Quantiser quantiser;
    quantiser.prepare(a, shared);
    wait_for_previous();
    if constexpr (!HASTY) let_next_start();
    quantiser.run(a, shared);
#else
    wait_for_previous();
    if constexpr (!HASTY) let_next_start();
    for (int row = threadIdx.x; row < width; row += THREADS) shared.levels[row].step = a.steps[row];
#endif
    __syncthreads();
    Activations activations(FUSED ? shared.activations : a.levels, a.steps);
    int warp = threadIdx.x / 32;
    while (true) {
        multiply_tiles(loaded, a, batch, activations, shared);
        if (SPLIT) shared.mailbox->wait();
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
