// Integer dot products with AVX2. Included by product_kernels.hpp, inside its namespace.

constexpr int widest = 4;

/// What is taken from a code before it is multiplied: nothing. vpmaddubsw multiplies unsigned by signed bytes.
constexpr int subtracted(int) { return 0; }

constexpr int vectors_at_once(int columns) { return columns == 1 ? 2 : 1; }

static inline NativeF load_half(const std::uint16_t* half) {
    return (NativeF)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(half)));
}

/// acc[v][c] = sum over `words` words of code * value, for `VECS` weight vectors `distance` bytes apart.
///
/// Pairs of products are summed in int16, which holds 40 steps of 2-bit and 8 of 4-bit codes (at most 30480). An 8-bit
/// code would saturate it, and is taken as two 4-bit ones.
template <int BITS, int VECS, int COLS>
inline void dot(const std::uint8_t* codes, std::ptrdiff_t distance, const std::int8_t* values,
                std::ptrdiff_t row_bytes, int words, NativeI (&acc)[VECS][COLS]) {
    constexpr int steps = 8 / BITS, nibbles = BITS == 8 ? 2 : 1;
    constexpr int plane_bits = BITS / nibbles;
    constexpr int batch = (BITS == 2 ? 40 : 8) / steps;
    const __m256i mask = _mm256_set1_epi8((1 << plane_bits) - 1);
    BITMTP_UNROLL for (int v = 0; v < VECS; ++v)
        BITMTP_UNROLL for (int c = 0; c < COLS; ++c) acc[v][c] = NativeI{};
    for (int begin = 0; begin < words; begin += batch) {
        const int end = begin + batch < words ? begin + batch : words;
        __m256i sum[VECS][COLS][nibbles];
        BITMTP_UNROLL for (int v = 0; v < VECS; ++v)
            BITMTP_UNROLL for (int c = 0; c < COLS; ++c)
                BITMTP_UNROLL for (int n = 0; n < nibbles; ++n) sum[v][c][n] = _mm256_setzero_si256();
        for (int word = begin; word < end; ++word) {
            BITMTP_UNROLL for (int v = 0; v < VECS; ++v) {
                const std::uint8_t* address = codes + v * distance + std::ptrdiff_t(word) * 64;
                const __m256i packed = _mm256_load_si256(reinterpret_cast<const __m256i*>(address));
                _mm_prefetch(reinterpret_cast<const char*>(address) + prefetch_ahead, _MM_HINT_T0);
                BITMTP_UNROLL for (int k = 0; k < steps * nibbles; ++k) {
                    const __m256i code = _mm256_and_si256(_mm256_srli_epi16(packed, plane_bits * k), mask);
                    BITMTP_UNROLL for (int c = 0; c < COLS; ++c) {
                        const std::int8_t* step = values + c * row_bytes + (word * steps + k / nibbles) * 4;
                        const __m256i pairs = _mm256_maddubs_epi16(code, _mm256_set1_epi32(load_step(step)));
                        sum[v][c][k % nibbles] = _mm256_add_epi16(sum[v][c][k % nibbles], pairs);
                    }
                }
            }
        }
        BITMTP_UNROLL for (int v = 0; v < VECS; ++v)
            BITMTP_UNROLL for (int c = 0; c < COLS; ++c)
                BITMTP_UNROLL for (int n = 0; n < nibbles; ++n)
                    acc[v][c] += (NativeI)_mm256_madd_epi16(sum[v][c][n], _mm256_set1_epi16(n ? 16 : 1));
    }
}
