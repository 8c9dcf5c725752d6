// The table of kernels: what is compiled once per instruction set and chosen at run time (dispatch.cpp).
//
// Everything here works on one row or one range of tiles and knows nothing of threads, passes or sequences. Entries are
// plain functions on plain memory: a kernel file must not instantiate library templates, because the linker would keep
// one copy of them, compiled for whichever instruction set came first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "packed.hpp"
#include "product.hpp"

namespace bitmtp {

constexpr int kBlockKeys = 16;       ///< keys side by side in the store's K layout
constexpr int kPiecePositions = 256; ///< positions of one attention piece, and slots of one piece of the store
constexpr int kMostQueries = 12;     ///< query heads that attend to a piece side by side
constexpr int kQueryChunk = 64;      ///< entries of a query that lie together while it attends
constexpr int kChunk = 64;           ///< entries to a maximum in `chunk_max`
constexpr int kSumBlock = 4096;      ///< entries of one blocked sum over the vocabulary

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

/// Consecutive visible positions of one attention piece whose K/V lie in consecutive slots of one piece of the store.
struct Run {
    const std::uint8_t* piece;  ///< the store's piece
    int place;                  ///< first position, within the attention piece
    int slot;                   ///< its slot, within the store's piece
    int count;

    bool operator==(const Run&) const = default;
};

constexpr std::uint32_t kAllRows = ~0u;

/// A run and the rows of a task that see it, a bit each; `kAllRows` if all do.
struct Span {
    Run run;
    std::uint32_t seen;
};

/// Where one layer's K and V of one kv head lie in a piece of the store, and their shape.
struct HeadLayout {
    std::size_t keys;    ///< byte offset of [16 blocks][head_dim][16 keys]
    std::size_t values;  ///< byte offset of [256][padded_dim]
    int head_dim;
    int padded_dim;  ///< head_dim rounded up to 16
    bool half;       ///< float16, else float32
};

/// Softmax of some positions, not yet divided: weighted values, maximum, sum of weights. One head.
struct Partial {
    float* o;  ///< [padded_dim]
    float m;
    float l;
};

/// A query head and where its result goes.
struct Query {
    const float* vector;  ///< [head_dim]
    Partial* out;
    int row;         ///< its bit in `Span::seen`
    int begin, end;  ///< the whole groups of 16 positions that hold all it sees of the piece
};

/// An entry (value, id) in the order of choosing: larger values first, then smaller ids. Entries behind it are cut.
struct Cut {
    float value;
    std::int32_t id;
};

/// Key of a row's noise: the two halves of docs/sampling.md's `k`.
struct NoiseKey {
    std::uint32_t low;
    std::uint32_t high;
};

struct Kernels {
    const char* name;
    bool dense;  ///< `product` takes ternary matrices packed densely

    /// For tiles [begin, end), whole units of the matrix, and all rows of `input`: y[row * stride + 16 * tile + lane].
    void (*product)(const PackedMatrix& matrix, const QuantRows& input, int begin, int end, float* y, std::ptrdiff_t stride);

    // Rows
    void (*norm)(const float* x, const float* weight, int n, float eps, float* y);
    /// As the input of `matrix`.
    void (*quantise)(const float* x, const PackedMatrix& matrix, const QuantRows& out, int row);
    void (*add)(float* x, const float* y, int n);
    /// Rotate halves by `cos`, `sin` [n / 2], then multiply by `scale`.
    void (*rope)(float* x, const float* cos, const float* sin, int n, float scale);
    /// Pairs of tiles (gate, up) to out[16 * pairs]: silu(gate) * up, or relu(gate)^2 * up.
    void (*activate)(const float* gate_up, float* out, int pairs, bool relu2);
    /// out[r] = lane_sum(a[r * stride …] * b), rows of n.
    void (*dots)(const float* a, std::ptrdiff_t stride, int rows, const float* b, int n, float* out);
    float (*dot_half)(const std::uint16_t* a, const float* b, int n);
    void (*expand_half)(const std::uint16_t* a, float* out, int n);
    /// x / (1 + exp(-x)), in place.
    void (*silu)(float* x, int n);

    // Attention
    void (*store_key)(std::uint8_t* piece, const HeadLayout& layout, int slot, const float* k);
    void (*store_value)(std::uint8_t* piece, const HeadLayout& layout, int slot, const float* v);
    /// One attention piece for query heads of one kv head; `spans` ascend by position.
    /// `scratch`: [kMostQueries][head_dim rounded up to kQueryChunk].
    void (*attend)(const HeadLayout& layout, const Span* spans, int count, const Query* queries, int heads,
                   float* scratch);
    /// Fold the next piece into the ones before it.
    void (*merge)(Partial& into, const Partial& next, int padded_dim);
    void (*divide)(const Partial& whole, int head_dim, float* out);

    // Vocabulary: n is a multiple of 16 everywhere, padded with `kNever`
    float (*maximum)(const float* x, int n);
    void (*chunk_max)(const float* x, int n, float* out);
    /// Indices of entries >= threshold, ascending; returns how many.
    int (*collect)(const float* x, int n, float threshold, std::int32_t* indices);
    /// lane_sums of e = exp(x - max) and of e * (x - max); n <= 4096.
    void (*exp_sums)(const float* x, int n, float max, float* sum, float* weighted);
    /// Weights exp(z - max), 0 behind the cut: out[n].
    void (*weights)(const float* z, const std::int32_t* ids, int n, float max, Cut cut, float* out);
    float (*blocked_sum)(const float* x, int n);
    void (*divide_all)(const float* x, int n, float by, float* out);
    /// Index of the largest z + noise among entries not behind the cut with exp(z - max) >= min_p; ties to the lowest
    /// id. `ids` ascend, unless n is 16.
    int (*best_noisy)(const float* z, const std::int32_t* ids, int n, float max, Cut cut, float min_p, NoiseKey key);
    float (*exp)(float x);
    float (*log)(float x);
};

/// Padding of vocabulary arrays: never the largest, and its weight is 0.
constexpr float kNever = -1e38f;

/// The best table this machine runs, or the one that the environment variable BITMTP_ISA names
/// (avx512vbmi, avx512, avx2, neon, portable). Throws std::invalid_argument if the machine or the build lacks it.
const Kernels& select_kernels();

}  // namespace bitmtp
