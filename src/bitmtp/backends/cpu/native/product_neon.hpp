// Integer dot products with the NEON dot-product extension. Included by product_kernels.hpp, inside its namespace.

constexpr int widest = 8;

/// What is taken from a code before it is multiplied: SDOT is signed by signed, and a code of 8 bits would be negative.
constexpr int subtracted(int bits) { return bits == 8 ? 128 : 0; }

constexpr int vectors_at_once(int columns) { return columns <= 4 ? 4 : 2; }

static inline NativeF load_half(const std::uint16_t* half) {
    return (NativeF)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(half)));
}

/// acc[v][c] = sum over `words` words of code * value, for `VECS` weight vectors `distance` bytes apart.
template <int BITS, int VECS, int COLS>
inline void dot(const std::uint8_t* codes, std::ptrdiff_t distance, const std::int8_t* values,
                std::ptrdiff_t row_bytes, int words, NativeI (&acc)[VECS][COLS]) {
    constexpr int planes = 8 / BITS;
    const uint8x16_t mask = vdupq_n_u8(std::uint8_t((1 << BITS) - 1));
    int32x4_t sum[VECS][COLS];
    BITMTP_UNROLL for (int v = 0; v < VECS; ++v)
        BITMTP_UNROLL for (int c = 0; c < COLS; ++c) sum[v][c] = vdupq_n_s32(0);
    for (int word = 0; word < words; ++word) {
        uint8x16_t packed[VECS];
        BITMTP_UNROLL for (int v = 0; v < VECS; ++v)
            packed[v] = vld1q_u8(codes + v * distance + std::ptrdiff_t(word) * 64);
        BITMTP_UNROLL for (int k = 0; k < planes; ++k) {
            int8x16_t code[VECS];
            BITMTP_UNROLL for (int v = 0; v < VECS; ++v) {
                const uint8x16_t moved = vshlq_u8(packed[v], vdupq_n_s8(std::int8_t(-BITS * k)));
                const uint8x16_t small = BITS == 8 ? veorq_u8(packed[v], vdupq_n_u8(0x80)) : vandq_u8(moved, mask);
                code[v] = vreinterpretq_s8_u8(small);
            }
            BITMTP_UNROLL for (int c = 0; c < COLS; ++c) {
                const std::int32_t step = load_step(values + c * row_bytes + (word * planes + k) * 4);
                const int8x16_t value = vreinterpretq_s8_s32(vdupq_n_s32(step));
                BITMTP_UNROLL for (int v = 0; v < VECS; ++v) sum[v][c] = vdotq_s32(sum[v][c], code[v], value);
            }
        }
    }
    BITMTP_UNROLL for (int v = 0; v < VECS; ++v)
        BITMTP_UNROLL for (int c = 0; c < COLS; ++c) acc[v][c] = (NativeI)sum[v][c];
}
