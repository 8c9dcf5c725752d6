// The operands of the low-bit products; the kernels are in product_kernels.hpp.
#pragma once

#include <cstdint>

namespace bitmtp {

/// Activations quantised to int8, a step to a row or to a group of its inputs.
struct QuantRows {
    int rows = 0;
    int in_padded = 0;               ///< bytes from row to row: `padded_inputs(in)`
    std::int8_t* values = nullptr;   ///< [rows][in_padded], 64-byte aligned, zero behind the inputs
    float* step = nullptr;           ///< [rows][step groups of the matrix]
    std::int32_t* sums = nullptr;    ///< [rows][groups of the matrix]: sum of the group's values
};

/// Bytes from row to row: whole cache lines, never a multiple of 1 KiB, which would put all rows into few cache sets.
constexpr int padded_inputs(int in) {
    const int lines = (in + 63) / 64 * 64;
    return lines % 1024 == 0 ? lines + 64 : lines;
}

}  // namespace bitmtp
