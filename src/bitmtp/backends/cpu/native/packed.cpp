#include "packed.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include <sys/mman.h>

namespace bitmtp {

namespace {

constexpr std::size_t huge_page = std::size_t(2) << 20;
constexpr std::size_t slab_bytes = 16 * huge_page;

struct Slab {
    explicit Slab(std::size_t size) : bytes(size) {
        if (posix_memalign(&memory, huge_page, size) != 0) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        madvise(memory, size, MADV_HUGEPAGE);  // a hint: without huge pages it is only slower
#endif
    }
    ~Slab() { std::free(memory); }
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;

    void* memory = nullptr;
    std::size_t bytes;
    std::size_t used = 0;
};

// The slab that this thread's next small buffers come from; it lives as long as a buffer in it.
thread_local std::weak_ptr<Slab> open_slab;

std::shared_ptr<Slab> slab_for(std::size_t bytes) {
    if (bytes > slab_bytes / 4) return std::make_shared<Slab>((bytes + huge_page - 1) / huge_page * huge_page);
    std::shared_ptr<Slab> slab = open_slab.lock();
    if (!slab || slab->used + bytes > slab->bytes) open_slab = slab = std::make_shared<Slab>(slab_bytes);
    return slab;
}

}  // namespace

AlignedBuffer::AlignedBuffer(std::size_t bytes) : bytes_(bytes) {
    const std::shared_ptr<Slab> slab = slab_for(bytes);
    data_ = static_cast<std::uint8_t*>(slab->memory) + slab->used;
    slab->used += (bytes + 63) / 64 * 64;
    owner_ = slab;
}

namespace {

// True, and `half` set, if the float is exactly a finite float16.
bool exact_half(float value, std::uint16_t& half) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const std::uint32_t sign = bits >> 16 & 0x8000;
    const int exponent = int(bits >> 23 & 0xff) - 127;
    const std::uint32_t mantissa = bits & 0x7fffff;
    half = std::uint16_t(sign);
    if (exponent == -127) return mantissa == 0;
    if (exponent > 15 || exponent < -24) return false;
    const bool normal = exponent >= -14;
    const int dropped = normal ? 13 : 13 + (-14 - exponent);
    const std::uint32_t kept = normal ? mantissa | std::uint32_t(exponent + 15) << 23 : mantissa | 0x800000;
    half = std::uint16_t(sign | kept >> dropped);
    return (kept & ((1u << dropped) - 1)) == 0;
}

// The float of a finite float16.
float half_value(std::uint16_t half) {
    const std::uint32_t sign = std::uint32_t(half & 0x8000) << 16;
    const std::uint32_t magnitude = half & 0x7fff;
    const float subnormal = float(magnitude) * 0x1p-24f;
    std::uint32_t bits = (magnitude << 13) + (112u << 23);
    if (magnitude < 0x400) std::memcpy(&bits, &subnormal, sizeof bits);
    bits |= sign;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

int divide_up(int value, int unit) { return (value + unit - 1) / unit; }

std::uint32_t swap_bits(std::uint32_t word, std::uint32_t low, int distance) {
    const std::uint32_t change = (word ^ word >> distance) & low;
    return word ^ change ^ change << distance;
}

// The disk has a word's inputs in ascending bits; the kernels want byte b, place k = input 4k + b: a transpose.
std::uint32_t kernel_word(std::uint32_t disk, int bits) {
    if (bits == 8) return disk ^ 0x80808080u;  // int8 to unsigned codes
    if (bits == 2) return swap_bits(swap_bits(disk, 0x00cc00cc, 6), 0x0000f0f0, 12);
    return swap_bits(swap_bits(disk, 0x0000ff00, 8), 0x00f000f0, 4);
}

int scale_groups(const MatrixSource& source) {
    if (source.scale_count == 1) return 1;
    const int groups = source.scale_count / source.out;
    const int word_inputs = 32 / source.bits;
    const bool whole = groups > 0 && groups * source.out == source.scale_count && source.in % groups == 0;
    if (!whole) {
        throw std::invalid_argument(std::to_string(source.scale_count) + " scales do not fit a " +
                                    std::to_string(source.out) + " x " + std::to_string(source.in) + " matrix");
    }
    if (groups > 1 && source.in / groups % word_inputs != 0) {
        throw std::invalid_argument("scale groups of " + std::to_string(source.in / groups) + " inputs at " +
                                    std::to_string(source.bits) + " bits: the cpu backend needs a multiple of " +
                                    std::to_string(word_inputs));
    }
    return groups;
}

void check(const MatrixSource& source) {
    if (source.bits != 2 && source.bits != 4 && source.bits != 8) {
        throw std::invalid_argument(std::to_string(source.bits) + "-bit weights: 2, 4 or 8 expected");
    }
    if (source.out < 1 || source.in < 1 || source.in * source.bits % 8 != 0) {
        throw std::invalid_argument(std::to_string(source.in) + " inputs do not fill whole bytes at " +
                                    std::to_string(source.bits) + " bits");
    }
}

// A matrix without contents, of the first part's inputs, with room for `tiles` tiles.
PackedMatrix allocate(const MatrixSource& source, int tiles, int groups, bool dense) {
    PackedMatrix matrix;
    matrix.in = source.in;
    matrix.bits = source.bits;
    matrix.dense = dense && source.bits == 2 && (groups == 1 || source.in / groups % dense::inputs == 0);
    const int unit_inputs = matrix.dense ? dense::inputs : matrix.word_inputs();
    matrix.steps = divide_up(source.in, unit_inputs) * unit_inputs / PackedMatrix::step_inputs;
    matrix.groups = groups;
    matrix.group = groups == 1 ? matrix.steps * PackedMatrix::step_inputs : source.in / groups;
    const int units = divide_up(tiles, matrix.unit());
    matrix.tiles = units * matrix.unit();
    matrix.out = matrix.tiles * tile_rows;
    matrix.codes = AlignedBuffer(units * matrix.unit_bytes());
    return matrix;
}

// A tile of the result: a source and the first of its rows. Padding tiles have no source.
struct TileSource {
    const MatrixSource* source;
    int first_row;

    bool has(int lane) const { return source && first_row + lane < source->out; }
    std::size_t row_bytes() const { return std::size_t(source->in) * source->bits / 8; }
    const std::uint8_t* row(int lane) const { return source->disk + (first_row + lane) * row_bytes(); }
};

void fill_codes(PackedMatrix& matrix, int tile, const TileSource& source) {
    auto* words = reinterpret_cast<std::uint32_t*>(matrix.codes.data() + tile * matrix.unit_bytes());
    for (std::size_t offset = 0; offset < matrix.unit_bytes() / tile_rows; offset += 4) {
        const std::size_t bytes = std::min<std::size_t>(4, source.row_bytes() - offset);
        for (int lane = 0; lane < tile_rows; ++lane) {
            std::uint32_t word = 0;
            if (source.has(lane)) std::memcpy(&word, source.row(lane) + offset, bytes);
            *words++ = kernel_word(word, matrix.bits);
        }
    }
}

// Four trits of a row, one to a byte.
std::uint32_t trits_at(const TileSource& source, int lane, std::size_t offset) {
    if (!source.has(lane) || offset >= source.row_bytes()) return 0;
    const std::uint32_t packed = source.row(lane)[offset];
    return (packed | packed << 6 | packed << 12 | packed << 18) & 0x03030303;
}

void fill_dense(PackedMatrix& matrix, int unit, const TileSource* sources) {
    auto* words = reinterpret_cast<std::uint32_t*>(matrix.codes.data() + unit * matrix.unit_bytes());
    for (int block = 0; block < matrix.steps / dense::steps; ++block, words += dense::vectors * tile_rows) {
        for (int lane = 0; lane < tile_rows; ++lane) {
            dense::Codes codes;
            for (int step = 0; step < dense::steps; ++step) {
                const std::size_t offset = std::size_t(block) * dense::steps + step;  // four ternary inputs are a byte
                codes.word[step] = dense::join(trits_at(sources[0], lane, offset), trits_at(sources[1], lane, offset),
                                               trits_at(sources[2], lane, offset));
            }
            const dense::Stored stored = dense::store(codes);
            for (int vector = 0; vector < dense::vectors; ++vector) words[vector * tile_rows + lane] = stored.word[vector];
        }
    }
}

// Scales in the matrix's order; 0 for padding rows.
std::vector<float> gather_scales(const PackedMatrix& matrix, const std::vector<TileSource>& tiles) {
    std::vector<float> scales(std::size_t(matrix.out) * matrix.groups);
    for (int tile = 0; tile < matrix.tiles; ++tile) {
        const TileSource& from = tiles[tile];
        for (int group = 0; group < matrix.groups; ++group) {
            float* to = scales.data() + matrix.scale_place(tile, group);
            for (int lane = 0; lane < tile_rows && from.has(lane); ++lane) {
                const int index = from.source->scale_count == 1 ? 0 : (from.first_row + lane) * matrix.groups + group;
                to[lane] = from.source->scales[index];
            }
        }
    }
    return scales;
}

bool halve(const std::vector<float>& values, std::vector<std::uint16_t>& halves) {
    halves.resize(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (!exact_half(values[i], halves[i])) return false;
    }
    return true;
}

// Float16 scales halve the bytes beside the codes; one scale to a row is too little to matter.
void store_scales(PackedMatrix& matrix, const std::vector<float>& scales) {
    std::vector<std::uint16_t> halves;
    matrix.half_scales = matrix.groups > 1 && halve(scales, halves);
    const void* values = scales.data();
    if (matrix.half_scales) values = halves.data();
    matrix.scales = AlignedBuffer(scales.size() * (matrix.half_scales ? sizeof(std::uint16_t) : sizeof(float)));
    std::memcpy(matrix.scales.data(), values, matrix.scales.bytes());
}

float scale_at(const PackedMatrix& matrix, std::ptrdiff_t place) {
    if (matrix.half_scales) return half_value(reinterpret_cast<const std::uint16_t*>(matrix.scales.data())[place]);
    return reinterpret_cast<const float*>(matrix.scales.data())[place];
}

PackedMatrix pack_tiles(std::vector<TileSource> tiles, bool dense) {
    const MatrixSource& first = *tiles[0].source;
    PackedMatrix matrix = allocate(first, int(tiles.size()), scale_groups(first), dense);
    tiles.resize(matrix.tiles, {nullptr, 0});
    for (int tile = 0; tile < matrix.tiles; tile += matrix.unit()) {
        if (matrix.dense) fill_dense(matrix, tile / matrix.unit(), &tiles[tile]);
        else fill_codes(matrix, tile, tiles[tile]);
    }
    store_scales(matrix, gather_scales(matrix, tiles));
    return matrix;
}

void check_alike(const MatrixSource& first, const MatrixSource& other) {
    if (first.in != other.in || first.bits != other.bits || scale_groups(first) != scale_groups(other)) {
        throw std::invalid_argument("matrices packed together differ in inputs, bits or scale groups");
    }
}

}  // namespace

PackedMatrix pack_matrix(const MatrixSource& source, bool dense) { return pack_stacked({source}, dense); }

PackedMatrix pack_stacked(const std::vector<MatrixSource>& parts, bool dense) {
    if (parts.empty()) throw std::invalid_argument("no matrices to pack");
    std::vector<TileSource> tiles;
    for (const MatrixSource& part : parts) {
        check(part);
        check_alike(parts[0], part);
        for (int row = 0; row < part.out; row += tile_rows) tiles.push_back({&part, row});
    }
    return pack_tiles(std::move(tiles), dense);
}

PackedMatrix pack_interleaved(const MatrixSource& first, const MatrixSource& second, bool dense) {
    check(first);
    check(second);
    check_alike(first, second);
    if (first.out != second.out) throw std::invalid_argument("interleaved matrices differ in outputs");
    std::vector<TileSource> tiles;
    for (int row = 0; row < first.out; row += tile_rows) {
        tiles.push_back({&first, row});
        tiles.push_back({&second, row});
    }
    return pack_tiles(std::move(tiles), dense);
}

namespace {

// Codes of inputs [begin, begin + 4) of a row, one to a byte.
std::uint32_t codes_at(const PackedMatrix& matrix, int tile, int lane, int begin) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(matrix.codes.data() +
                                                               tile / matrix.unit() * matrix.unit_bytes()) + lane;
    if (!matrix.dense) {
        const int place = begin % matrix.word_inputs() / PackedMatrix::step_inputs;
        const std::uint32_t word = words[begin / matrix.word_inputs() * tile_rows] >> matrix.bits * place;
        return word & dense::each_byte((1u << matrix.bits) - 1);
    }
    words += begin / dense::inputs * dense::vectors * tile_rows;
    dense::Stored stored;
    for (int vector = 0; vector < dense::vectors; ++vector) stored.word[vector] = words[vector * tile_rows];
    const std::uint32_t joint = dense::load(stored).word[begin % dense::inputs / PackedMatrix::step_inputs];
    std::uint32_t codes = 0;
    for (int b = 0; b < 4; ++b) codes |= std::uint32_t(dense::trit(joint >> 8 * b & 0xff, tile % dense::tiles)) << 8 * b;
    return codes;
}

}  // namespace

void unpack_row(const PackedMatrix& matrix, int row, float* values) {
    const int tile = row / tile_rows, lane = row % tile_rows;
    for (int begin = 0; begin < matrix.in; begin += PackedMatrix::step_inputs) {
        const float scale = scale_at(matrix, matrix.scale_place(tile, begin / matrix.group) + lane);
        const std::uint32_t codes = codes_at(matrix, tile, lane, begin);
        for (int b = 0; b < std::min(PackedMatrix::step_inputs, matrix.in - begin); ++b) {
            values[begin + b] = float(int(codes >> 8 * b & 0xff) - matrix.zero_point()) * scale;
        }
    }
}

}  // namespace bitmtp
