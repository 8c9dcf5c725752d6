// Ternary weights at five bits for three: what AVX-512 VBMI unpacks as cheaply as two bits for one.
//
// A code holds the trits (weight + 1) of one input in the same row of three neighbouring tiles: t0 + 3 t1 + 9 t2, 27 of
// 32 values. A block is eight steps of four inputs: eight vectors of 16 rows x 4 inputs of codes, kept in five. The low
// five bits of the five are vectors 0 to 4; vectors 5, 6 and 7 are cut up and lie in the bits above:
//
//   stored vector   0                1                2                3                          4
//   bits 5 to 7     5's bits 0 to 2  6's bits 0 to 2  7's bits 0 to 2  5's 3 and 4, 7's bit 4     6's 3 and 4, 7's bit 3
//
// so that a kernel finds each with a shift or two and a select, and looks its trits up by the low six bits, of which the
// sixth means nothing.
#pragma once

#include <cstdint>

namespace bitmtp::dense {

constexpr int tiles = 3;   ///< that share a code
constexpr int steps = 8;   ///< of four inputs, in a block
constexpr int inputs = 4 * steps;
constexpr int vectors = 5; ///< of 64 bytes, in a block

/// Four codes, one to a byte, of each of eight steps.
struct Codes {
    std::uint32_t word[steps];
};

/// The same, as they are stored.
struct Stored {
    std::uint32_t word[vectors];
};

/// Codes of four trits, one to a byte, of each tile.
constexpr std::uint32_t join(std::uint32_t first, std::uint32_t second, std::uint32_t third) {
    return first + 3 * second + 9 * third;  // at most 26: no byte carries
}

/// The trit of a tile in a code.
constexpr int trit(std::uint32_t code, int tile) { return int(tile == 0 ? code : tile == 1 ? code / 3 : code / 9) % 3; }

constexpr std::uint32_t each_byte(std::uint32_t bits) { return bits * 0x01010101u; }

constexpr Stored store(const Codes& codes) {
    const std::uint32_t* c = codes.word;
    const std::uint32_t low = each_byte(7), high = each_byte(24), bit3 = each_byte(8), bit4 = each_byte(16);
    return {{c[0] | (c[5] & low) << 5, c[1] | (c[6] & low) << 5, c[2] | (c[7] & low) << 5,
             c[3] | (c[5] & high) << 2 | (c[7] & bit4) << 3, c[4] | (c[6] & high) << 2 | (c[7] & bit3) << 4}};
}

constexpr Codes load(const Stored& stored) {
    const std::uint32_t* s = stored.word;
    const std::uint32_t five = each_byte(31), low = each_byte(7), high = each_byte(24);
    return {{s[0] & five, s[1] & five, s[2] & five, s[3] & five, s[4] & five,
             (s[0] >> 5 & low) | (s[3] >> 2 & high), (s[1] >> 5 & low) | (s[4] >> 2 & high),
             (s[2] >> 5 & low) | (s[3] >> 3 & each_byte(16)) | (s[4] >> 4 & each_byte(8))}};
}

}  // namespace bitmtp::dense
