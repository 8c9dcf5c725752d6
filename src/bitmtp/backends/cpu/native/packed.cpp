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
std::uint32_t kernel_word(std::uint32_t disk, int bits, bool is_signed) {
    if (bits == 8) return is_signed ? disk ^ 0x80808080u : disk;  // int8 to unsigned codes
    if (bits == 2) return swap_bits(swap_bits(disk, 0x00cc00cc, 6), 0x0000f0f0, 12);
    return swap_bits(swap_bits(disk, 0x0000ff00, 8), 0x00f000f0, 4);
}

int scale_groups(const MatrixSource& source) {
    if (source.scale_count == 1) return 1;
    const int groups = source.scale_count / source.out;
    if (groups > 0 && groups * source.out == source.scale_count && source.in % groups == 0) return groups;
    throw std::invalid_argument(std::to_string(source.scale_count) + " scales do not fit a " +
                                std::to_string(source.out) + " x " + std::to_string(source.in) + " matrix");
}

int step_groups(const MatrixSource& source) { return source.step_inputs ? source.in / source.step_inputs : 1; }

// log2 of how many sums share something of which a row has `parts`.
int shared_shift(int groups, int parts) {
    int shift = 0;
    while (parts << shift < groups) ++shift;
    if (parts > 1 && parts << shift != groups) {
        throw std::invalid_argument("groups of scales and of activations: one must be the other times a power of two");
    }
    return parts > 1 ? shift : 31;  // every sum's
}

void check(const MatrixSource& source) {
    if (source.bits != 2 && source.bits != 4 && source.bits != 8) {
        throw std::invalid_argument(std::to_string(source.bits) + "-bit weights: 2, 4 or 8 expected");
    }
    if (source.out < 1 || source.in < 1 || source.in * source.bits % 8 != 0) {
        throw std::invalid_argument(std::to_string(source.in) + " inputs do not fill whole bytes at " +
                                    std::to_string(source.bits) + " bits");
    }
    const int groups = std::max(scale_groups(source), step_groups(source)), word_inputs = 32 / source.bits;
    if (groups > 1 && source.in / groups % word_inputs != 0) {
        throw std::invalid_argument("groups of " + std::to_string(source.in / groups) + " inputs at " +
                                    std::to_string(source.bits) + " bits: the cpu backend needs a multiple of " +
                                    std::to_string(word_inputs));
    }
}

// Whether no code of 2 bits is 3.
bool is_ternary(const MatrixSource& source) {
    if (source.bits != 2 || source.minimums) return false;
    const std::uint8_t* end = source.disk + std::size_t(source.out) * source.in / 4;
    return std::all_of(source.disk, end, [](std::uint8_t byte) { return (byte & byte >> 1 & 0x55) == 0; });
}

void set_groups(PackedMatrix& matrix, const MatrixSource& source) {
    matrix.scale_groups = scale_groups(source);
    matrix.step_groups = step_groups(source);
    matrix.groups = std::max(matrix.scale_groups, matrix.step_groups);
    matrix.scale_shift = shared_shift(matrix.groups, matrix.scale_groups);
    matrix.step_shift = shared_shift(matrix.groups, matrix.step_groups);
    matrix.step_last = source.step_inputs == 0;
    matrix.scale_last = !source.scale_by_group && !matrix.step_last && !source.minimums;
}

// A matrix without contents, of the first part's inputs, with room for `tiles` tiles.
PackedMatrix allocate(const MatrixSource& source, int tiles, bool dense) {
    PackedMatrix matrix;
    set_groups(matrix, source);
    const int group = source.in / matrix.groups;
    matrix.in = source.in;
    matrix.bits = source.bits;
    matrix.zero = source.minimums ? 0 : source.bits == 2 ? 1 : 1 << (source.bits - 1);
    matrix.dense = dense && matrix.step_last && (matrix.groups == 1 || group % dense::inputs == 0);
    const int unit_inputs = matrix.dense ? dense::inputs : matrix.word_inputs();
    matrix.steps = divide_up(source.in, unit_inputs) * unit_inputs / PackedMatrix::step_inputs;
    matrix.group = matrix.groups == 1 ? matrix.steps * PackedMatrix::step_inputs : group;
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
            *words++ = kernel_word(word, matrix.bits, matrix.zero > 0);
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

// Scales, or minimums, in the matrix's order; 0 for padding rows.
std::vector<float> gather(const PackedMatrix& matrix, const std::vector<TileSource>& tiles,
                          const float* MatrixSource::*factors) {
    std::vector<float> gathered(std::size_t(matrix.out) * matrix.scale_groups);
    for (int tile = 0; tile < matrix.tiles; ++tile) {
        const TileSource& from = tiles[tile];
        for (int group = 0; group < matrix.scale_groups; ++group) {
            float* to = gathered.data() + matrix.scale_place(tile, group);
            for (int lane = 0; lane < tile_rows && from.has(lane); ++lane) {
                const int row = from.first_row + lane;
                to[lane] = (from.source->*factors)[from.source->scale_count == 1 ? 0 : row * matrix.scale_groups + group];
            }
        }
    }
    return gathered;
}

bool halve(const std::vector<float>& values, std::vector<std::uint16_t>& halves) {
    halves.resize(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (!exact_half(values[i], halves[i])) return false;
    }
    return true;
}

// Float16 halves the bytes beside the codes; one scale to a row is too little to matter.
PackedMatrix::Factors store_factors(const std::vector<float>& values, bool grouped) {
    std::vector<std::uint16_t> halves;
    const bool half = grouped && halve(values, halves);
    PackedMatrix::Factors factors = {AlignedBuffer(values.size() * (half ? sizeof(std::uint16_t) : sizeof(float))), half};
    const void* from = values.data();
    if (half) from = halves.data();
    std::memcpy(factors.values.data(), from, factors.values.bytes());
    return factors;
}

float factor_at(const PackedMatrix::Factors& factors, std::ptrdiff_t place) {
    if (factors.half) return half_value(reinterpret_cast<const std::uint16_t*>(factors.values.data())[place]);
    return reinterpret_cast<const float*>(factors.values.data())[place];
}

PackedMatrix pack_tiles(std::vector<TileSource> tiles, bool dense) {
    const bool ternary = std::all_of(tiles.begin(), tiles.end(), [](const TileSource& tile) {
        return tile.first_row > 0 || is_ternary(*tile.source);
    });
    PackedMatrix matrix = allocate(*tiles[0].source, int(tiles.size()), dense && ternary);
    tiles.resize(matrix.tiles, {nullptr, 0});
    for (int tile = 0; tile < matrix.tiles; tile += matrix.unit()) {
        if (matrix.dense) fill_dense(matrix, tile / matrix.unit(), &tiles[tile]);
        else fill_codes(matrix, tile, tiles[tile]);
    }
    const bool grouped = matrix.scale_groups > 1, minimums = tiles[0].source->minimums;
    matrix.scales = store_factors(gather(matrix, tiles, &MatrixSource::scales), grouped);
    if (minimums) matrix.minimums = store_factors(gather(matrix, tiles, &MatrixSource::minimums), grouped);
    return matrix;
}

void check_alike(const MatrixSource& first, const MatrixSource& other) {
    if (!first.alike(other)) throw std::invalid_argument("matrices packed together differ in inputs, bits or groups");
}

}  // namespace

bool MatrixSource::alike(const MatrixSource& other) const {
    return in == other.in && bits == other.bits && step_inputs == other.step_inputs && !minimums == !other.minimums &&
           scale_groups(*this) == scale_groups(other);
}

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
        const std::ptrdiff_t place = matrix.scale_place(tile, begin / matrix.group >> matrix.scale_shift) + lane;
        const float scale = factor_at(matrix.scales, place);
        const std::uint32_t codes = codes_at(matrix, tile, lane, begin);
        for (int b = 0; b < std::min(PackedMatrix::step_inputs, matrix.in - begin); ++b) {
            values[begin + b] = float(int(codes >> 8 * b & 0xff) - matrix.zero) * scale;
            if (matrix.has_minimum()) values[begin + b] += factor_at(matrix.minimums, place);
        }
    }
}

}  // namespace bitmtp
