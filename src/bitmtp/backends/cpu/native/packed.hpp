// Low-bit weight matrices in the order the kernels read them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "dense.hpp"

namespace bitmtp {

constexpr int tile_rows = 16;  ///< output rows of a tile: the lanes of every kernel

/// Memory aligned to 64 bytes, on huge pages where the system has them. Move only.
///
/// Small buffers are cut from common slabs in the order they are made: the matrices of a small model then share huge
/// pages too, which is worth a tenth of its products' time, and lie in the order a pass reads them.
class AlignedBuffer {
public:
    AlignedBuffer() = default;
    /// Uninitialised memory. Throws std::bad_alloc.
    explicit AlignedBuffer(std::size_t bytes);
    AlignedBuffer(AlignedBuffer&&) = default;
    AlignedBuffer& operator=(AlignedBuffer&&) = default;

    std::size_t bytes() const { return bytes_; }
    std::uint8_t* data() { return data_; }
    const std::uint8_t* data() const { return data_; }

private:
    std::shared_ptr<void> owner_;  // the slab
    std::uint8_t* data_ = nullptr;
    std::size_t bytes_ = 0;
};

/// A packed `[out, in]` matrix of 2-, 4- or 8-bit weights with its scales.
///
/// `codes` is, unless `dense`, `[tiles][steps * bits / 8][16 rows]` 32-bit words. A word holds `8 / bits` steps of four inputs of
/// one row: byte b, place k (bits `bits * k` and up) is input `step_inputs * k + b` after the word's first. That is the form in
/// which one AND, after at most one shift, gives a vector of 16 rows × 4 inputs for an outer-product kernel. Codes are
/// unsigned, weight + `zero`. Inputs are padded to whole words, rows to whole tiles.
///
/// A dense ternary matrix has `[tiles / 3][steps / 8][5 vectors][16 rows]` words instead, five bits for three weights: see
/// dense.hpp. Inputs are padded to 32, rows to three tiles.
///
/// Integers are summed over `group` inputs, the finer of what shares a scale and what shares a step of the activations.
/// `scales` is `[tiles / unit()][scale_groups][unit()][16 rows]`, and `minimums` alike, where there are any.
struct PackedMatrix {
    static constexpr int step_inputs = 4;

    /// Float32, or float16 where there are several groups and every value is a float16 exactly: the kernel's bits do not
    /// change, the memory traffic does.
    struct Factors {
        AlignedBuffer values;
        bool half = false;
    };

    int out = 0;    ///< rows, padding of stacked parts included
    int in = 0;     ///< inputs, unpadded
    int bits = 0;   ///< 2, 4 or 8
    int zero = 0;   ///< code of the integer 0
    int group = 0;  ///< inputs to a sum; the padded inputs when there is one sum to a row
    int groups = 0;
    int scale_groups = 0;
    int scale_shift = 0;  ///< sums that share a scale, as a power of two
    int step_groups = 0;
    int step_shift = 0;
    bool step_last = true;    ///< one activation step to the row, applied to the whole sum
    bool scale_last = false;  ///< the row's only scale is, too
    int tiles = 0;
    int steps = 0;  ///< steps of four inputs, padded to whole words
    bool dense = false;
    AlignedBuffer codes;
    Factors scales, minimums;

    bool has_minimum() const { return minimums.values.bytes() > 0; }
    int word_inputs() const { return 32 / bits; }
    int unit() const { return dense ? dense::tiles : 1; }  ///< tiles that are packed together
    std::size_t unit_bytes() const {  ///< of its codes
        return std::size_t(dense ? steps / dense::steps * dense::vectors : steps * bits / 8) * 64;
    }
    /// Of the first of a tile's 16 factors of a scale group, in `scales` and `minimums`.
    std::ptrdiff_t scale_place(int tile, int scale_group) const {
        return ((std::ptrdiff_t(tile / unit()) * scale_groups + scale_group) * unit() + tile % unit()) * tile_rows;
    }
    std::size_t bytes() const { return codes.bytes() + scales.values.bytes() + minimums.values.bytes(); }
};

/// A matrix as it lies in a checkpoint (docs/format.md); borrowed memory.
struct MatrixSource {
    const std::uint8_t* disk;  ///< [out][in * bits / 8]
    int out;
    int in;
    int bits;
    const float* scales;  ///< [1] per tensor, [out] per row, [out][in / g] per group
    int scale_count;
    bool scale_by_group;
    const float* minimums = nullptr;  ///< as many as scales; codes are then the integers themselves
    int step_inputs = 0;              ///< inputs that share a step of the activations; 0: all of them

    bool alike(const MatrixSource& other) const;  ///< whether the two can be packed together
};

/// Pack one matrix, densely if `dense` and it is ternary, its activations have one step to a row, and its groups, if any,
/// are multiples of 32 inputs. Throws std::invalid_argument for sizes or scale counts that do not fit the format, or for
/// groups that are no multiple of a word's inputs (16, 8 or 4).
PackedMatrix pack_matrix(const MatrixSource& source, bool dense);

/// Pack matrices that share their input one below the other. Each starts a new tile: the result's row of part i, row r
/// is `16 * (tiles of the parts before) + r`. Throws std::invalid_argument if inputs, bits or groups differ.
PackedMatrix pack_stacked(const std::vector<MatrixSource>& parts, bool dense);

/// Pack two matrices of one shape tile by tile in turns: tile 2i is tile i of `first`, tile 2i + 1 that of `second`.
PackedMatrix pack_interleaved(const MatrixSource& first, const MatrixSource& second, bool dense);

/// Row `row` as floats, integer × scale, maybe + minimum, of its row or group, into `values[in]` (an embedding that is also the head).
void unpack_row(const PackedMatrix& matrix, int row, float* values);

}  // namespace bitmtp
