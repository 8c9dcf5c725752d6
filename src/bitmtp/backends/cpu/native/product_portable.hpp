// Integer dot products in plain C++ vectors. Included by product_kernels.hpp, inside its namespace.

constexpr int widest = 4;

/// What is taken from a code before it is multiplied.
constexpr int subtracted(int) { return 0; }

constexpr int vectors_at_once(int) { return 1; }

static inline NativeF load_half(const std::uint16_t* half) {
    NativeF value;
    for (int lane = 0; lane < kNative; ++lane) value[lane] = half_to_float(half[lane]);
    return value;
}

/// acc[v][c] = sum over `words` words of code * value, for `VECS` weight vectors `distance` bytes apart.
template <int BITS, int VECS, int COLS>
inline void dot(const std::uint8_t* codes, std::ptrdiff_t distance, const std::int8_t* values,
                std::ptrdiff_t row_bytes, int words, NativeI (&acc)[VECS][COLS]) {
    constexpr int inputs = 32 / BITS;
    for (int v = 0; v < VECS; ++v) {
        for (int c = 0; c < COLS; ++c) acc[v][c] = NativeI{};
        for (int word = 0; word < words; ++word) {
            NativeU packed;
            std::memcpy(&packed, codes + v * distance + std::ptrdiff_t(word) * 64, sizeof packed);
            for (int i = 0; i < inputs; ++i) {
                const NativeI code = (NativeI)(packed >> (8 * (i % 4) + BITS * (i / 4)) & ((1u << BITS) - 1));
                const std::int8_t* value = values + word * inputs + i;
                for (int c = 0; c < COLS; ++c) acc[v][c] += code * std::int32_t(value[c * row_bytes]);
            }
        }
    }
}
