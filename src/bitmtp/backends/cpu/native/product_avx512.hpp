// Integer dot products with AVX-512 VNNI. Included by product_kernels.hpp, inside its namespace.

constexpr int widest = 12;

/// What is taken from a code before it is multiplied: nothing. VNNI multiplies unsigned by signed bytes.
constexpr int subtracted(int) { return 0; }

/// Weight vectors to take at once: narrow blocks need more independent chains, wide ones have no registers left.
constexpr int vectors_at_once(int columns) { return columns <= 4 ? 4 : 2; }

static inline NativeF load_half(const std::uint16_t* half) {
    return (NativeF)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half)));
}

// Written as assembly because GCC does not keep the accumulators in place: it copies and spills them round the loop, at
// a third of the speed.
static inline void dot_step(__m512i& sum, __m512i code, __m512i value) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(code), "v"(value));
}

/// acc[v][c] = sum over `words` words of code * value, for `VECS` weight vectors `distance` bytes apart.
///
/// A plane that is not shifted down enters 4, 16 or 64 times too large, so planes with the same factor share an
/// accumulator that is divided (exactly) at the end: an AND and sometimes no shift for each plane, as many
/// accumulators to a column as the registers allow.
template <int BITS, int VECS, int COLS>
inline void dot(const std::uint8_t* codes, std::ptrdiff_t distance, const std::int8_t* values,
                std::ptrdiff_t row_bytes, int words, NativeI (&acc)[VECS][COLS]) {
    constexpr int planes = 8 / BITS;
    constexpr int most = VECS * COLS <= 4 ? 4 : VECS * COLS <= 10 ? 2 : 1;
    constexpr int sums = planes < most ? planes : most;
    constexpr int shared = planes / sums;
    __m512i sum[VECS][COLS][sums];
    BITMTP_UNROLL for (int v = 0; v < VECS; ++v)
        BITMTP_UNROLL for (int c = 0; c < COLS; ++c)
            BITMTP_UNROLL for (int s = 0; s < sums; ++s) sum[v][c][s] = _mm512_setzero_si512();
    for (int word = 0; word < words; ++word) {
        __m512i packed[VECS];
        BITMTP_UNROLL for (int v = 0; v < VECS; ++v) {
            const std::uint8_t* address = codes + v * distance + std::ptrdiff_t(word) * 64;
            packed[v] = _mm512_load_si512(address);
            _mm_prefetch(reinterpret_cast<const char*>(address) + prefetch_ahead, _MM_HINT_T0);
        }
        BITMTP_UNROLL for (int k = 0; k < planes; ++k) {
            const int shift = BITS * (k % shared);
            const __m512i mask = _mm512_set1_epi8(char(((1 << BITS) - 1) << (BITS * k - shift)));
            __m512i code[VECS];
            BITMTP_UNROLL for (int v = 0; v < VECS; ++v) {
                const __m512i moved = shift ? _mm512_srli_epi16(packed[v], shift) : packed[v];
                code[v] = BITS == 8 ? moved : _mm512_and_si512(moved, mask);
            }
            BITMTP_UNROLL for (int c = 0; c < COLS; ++c) {
                const __m512i value = _mm512_set1_epi32(load_step(values + c * row_bytes + (word * planes + k) * 4));
                BITMTP_UNROLL for (int v = 0; v < VECS; ++v) dot_step(sum[v][c][k / shared], code[v], value);
            }
        }
    }
    BITMTP_UNROLL for (int v = 0; v < VECS; ++v)
        BITMTP_UNROLL for (int c = 0; c < COLS; ++c) {
            NativeI total = (NativeI)sum[v][c][0];
            BITMTP_UNROLL for (int s = 1; s < sums; ++s) total += (NativeI)sum[v][c][s] >> BITS * shared * s;
            acc[v][c] = total;
        }
}
