// The low-bit products, once per instruction set: the including file is compiled several times, with the compiler's
// flags choosing the kernels and BITMTP_ISA naming the namespace they live in.
//
// Outer-product form: a vector is 16 output rows (8 or 4 on narrower machines) × 4 inputs, and an activation row
// (a column of the block) is broadcast four bytes at a time. Integer sums are exact, so only they differ among the
// machines; the float code is one source, and its order is that of docs/numerics.md. Nothing here may be shared by the
// linker among the builds, hence internal linkage and no library templates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dense.hpp"
#include "half.hpp"
#include "packed.hpp"
#include "product.hpp"
#include "simd.hpp"

// Accumulator arrays live in registers only if every loop over them is unrolled.
#if defined(__clang__)
#define BITMTP_UNROLL _Pragma("clang loop unroll(full)")
#else
#define BITMTP_UNROLL _Pragma("GCC unroll 16")
#endif

namespace bitmtp::BITMTP_ISA {
namespace product {

constexpr int prefetch_ahead = 4096;  ///< bytes; the hardware's own prefetch stops at each 4 KiB page
constexpr int vector_bytes = 4 * kNative;

static inline std::int32_t load_step(const std::int8_t* values) {
    std::int32_t step;
    std::memcpy(&step, values, sizeof step);
    return step;
}

#if defined(__AVX512VNNI__)
#include "product_avx512.hpp"
#elif defined(__AVX2__)
#include "product_avx2.hpp"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "product_neon.hpp"
#else
#include "product_portable.hpp"
#endif

static inline NativeF load_factors(const PackedMatrix::Factors& factors, std::ptrdiff_t place) {
    if (factors.half) return load_half(reinterpret_cast<const std::uint16_t*>(factors.values.data()) + place);
    NativeF values;
    std::memcpy(&values, factors.values.data() + place * sizeof(float), sizeof values);
    return values;
}

/// Results of `VECS` weight vectors from `index` on (counted through the tiles) for `COLS` rows of activations.
template <int BITS, int VECS, int COLS>
inline void block(const PackedMatrix& matrix, const QuantRows& input, int index, int column, float* y,
                  std::ptrdiff_t stride) {
    static_assert(kParts == 1 || kParts % VECS == 0);
    const std::ptrdiff_t tile_bytes = std::ptrdiff_t(matrix.unit_bytes());
    const std::ptrdiff_t distance = kParts == 1 ? tile_bytes : vector_bytes;
    const std::ptrdiff_t scale_distance = kParts == 1 ? matrix.scale_groups * tile_rows : kNative;
    const std::uint8_t* codes = matrix.codes.data() + index / kParts * tile_bytes + index % kParts * vector_bytes;
    const std::int8_t* values = input.values + std::ptrdiff_t(column) * input.in_padded;
    const std::int32_t* sums = input.sums + std::ptrdiff_t(column) * matrix.groups;
    const float* steps = input.step + std::ptrdiff_t(column) * matrix.step_groups;
    const std::ptrdiff_t scale_place = matrix.scale_place(index / kParts, 0) + index % kParts * kNative;
    const int words = matrix.group / matrix.word_inputs(), zero = matrix.zero - subtracted(BITS);
    const bool minimum = matrix.has_minimum();
    NativeF total[VECS][COLS];
    // -0 + x is x for every x, so that the first group needs no case of its own.
    BITMTP_UNROLL for (int v = 0; v < VECS; ++v)
        BITMTP_UNROLL for (int c = 0; c < COLS; ++c) total[v][c] = -NativeF{};
    for (int group = 0; group < matrix.groups; ++group) {
        NativeI acc[VECS][COLS];
        dot<BITS, VECS, COLS>(codes, distance, values, input.in_padded, words, acc);
        BITMTP_UNROLL for (int v = 0; v < VECS; ++v) {
            const std::ptrdiff_t place =
                scale_place + (group >> matrix.scale_shift) * tile_rows + v * scale_distance;
            const NativeF scale = load_factors(matrix.scales, place);
            const NativeF least = minimum ? load_factors(matrix.minimums, place) : NativeF{};
            BITMTP_UNROLL for (int c = 0; c < COLS; ++c) {
                const std::int32_t sum = sums[c * matrix.groups + group];
                NativeF term = __builtin_convertvector(acc[v][c] - zero * sum, NativeF);
                if (!matrix.scale_last) term = term * scale;
                if (minimum) term = term + float(sum) * least;
                if (!matrix.step_last) term = term * steps[c * matrix.step_groups + (group >> matrix.step_shift)];
                total[v][c] = total[v][c] + term;
            }
        }
        codes += std::ptrdiff_t(words) * 64;
        values += matrix.group;
    }
    BITMTP_UNROLL for (int v = 0; v < VECS; ++v)
        BITMTP_UNROLL for (int c = 0; c < COLS; ++c) {
            NativeF result = total[v][c];
            if (matrix.scale_last) result = result * load_factors(matrix.scales, scale_place + v * scale_distance);
            if (matrix.step_last) result = result * steps[c];
            std::memcpy(y + (column + c) * stride + (index + v) * kNative, &result, sizeof result);
        }
}

/// Tiles [begin, end) for `COLS` rows of activations from `column` on.
template <int BITS, int COLS>
static void columns(const PackedMatrix& matrix, const QuantRows& input, int begin, int end, int column, float* y,
                    std::ptrdiff_t stride) {
    constexpr int at_once = vectors_at_once(COLS);
    int index = begin * kParts;
    for (; index + at_once <= end * kParts; index += at_once)
        block<BITS, at_once, COLS>(matrix, input, index, column, y, stride);
    for (; index < end * kParts; ++index) block<BITS, 1, COLS>(matrix, input, index, column, y, stride);
}

using Columns = void (*)(const PackedMatrix&, const QuantRows&, int, int, int, float*, std::ptrdiff_t);

template <int BITS, int COLS = widest>
static Columns columns_kernel(int count) {
    if constexpr (COLS > 1) {
        if (count < COLS) return columns_kernel<BITS, COLS - 1>(count);
    }
    return columns<BITS, COLS>;
}

static inline Columns columns_kernel(int bits, int count) {
    return bits == 2 ? columns_kernel<2>(count) : bits == 4 ? columns_kernel<4>(count) : columns_kernel<8>(count);
}

#if defined(__AVX512VBMI__)
#include "product_vbmi.hpp"
constexpr bool takes_dense = true;
#else
constexpr int widest_dense = 0;
constexpr bool takes_dense = false;
static inline Columns dense_kernel(int) { return nullptr; }  // no matrix is dense
#endif

}  // namespace product

/// Output tiles [tile_begin, tile_end) for every row of `input`: `product` of docs/numerics.md, bias not included, as
/// `y[row * stride + 16 * tile + lane]`. Padding lanes are written too: `stride >= 16 * matrix.tiles`.
static void product_tiles(const PackedMatrix& matrix, const QuantRows& input, int tile_begin, int tile_end, float* y,
                          std::ptrdiff_t stride) {
    const int widest = matrix.dense ? product::widest_dense : product::widest;
    const int blocks = (input.rows + widest - 1) / widest;
    const int few = matrix.dense ? 6 : 4;  // tiles that stay in cache for every block
    const int tiles_at_once = blocks == 1 ? tile_end - tile_begin : few;
    for (int tile = tile_begin; tile < tile_end; tile += tiles_at_once) {
        const int end = tile + tiles_at_once < tile_end ? tile + tiles_at_once : tile_end;
        for (int block = 0; block < blocks; ++block) {
            const int column = input.rows * block / blocks, count = input.rows * (block + 1) / blocks - column;
            const product::Columns kernel =
                matrix.dense ? product::dense_kernel(count) : product::columns_kernel(matrix.bits, count);
            kernel(matrix, input, tile, end, column, y, stride);
        }
    }
}

}  // namespace bitmtp::BITMTP_ISA
