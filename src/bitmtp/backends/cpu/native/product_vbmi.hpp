// Products of densely packed ternary matrices (dense.hpp). Included by product_kernels.hpp, inside its namespace.

constexpr int widest_dense = 8;

/// Groups of three tiles to take at once: several streams read memory faster than one, the hardware's own prefetch running
/// ahead in each, and share the activations; beyond four columns the accumulators of one are all that the registers hold.
constexpr int triples_at_once(int columns) { return columns == 1 ? 4 : columns == 2 ? 3 : columns <= 4 ? 2 : 1; }

/// Bytes to prefetch ahead in each stream: the more streams, the longer each takes for them.
constexpr int stream_ahead(int triples) { return triples > 2 ? prefetch_ahead / 2 : prefetch_ahead; }

/// By code, the trits of the three tiles; twice, because bit 5 of an index is not the code's.
struct TritTables {
    std::int8_t trit[dense::tiles][64];

    constexpr TritTables() : trit() {
        for (int i = 0; i < 64; ++i)
            for (int tile = 0; tile < dense::tiles; ++tile) trit[tile][i] = std::int8_t(dense::trit(i % 32, tile));
    }
};
alignas(64) constexpr TritTables trit_tables;

struct ByteMasks {
    std::uint8_t low[2][64];

    constexpr ByteMasks() : low() {
        for (int i = 0; i < 64; ++i) {
            low[0][i] = 0x07;
            low[1][i] = 0x0f;
        }
    }
};
alignas(64) constexpr ByteMasks byte_masks;

/// `a` where the mask is set, else `b`. The mask stays in memory: the accumulators need the registers.
BITMTP_INLINE __m512i select(__m512i a, __m512i b, const std::uint8_t (&mask)[64]) {
    asm("vpternlogq $0xe4, %2, %1, %0" : "+v"(a) : "v"(b), "m"(mask));
    return a;
}

/// Of each byte, the table's entry that its low six bits name. (The masked form: as in half.hpp.)
BITMTP_INLINE __m512i look_up(__m512i codes, __m512i table) { return _mm512_maskz_permutexvar_epi8(~0ull, codes, table); }

/// The codes of one step of a block, in the low five bits of each byte.
template <int STEP>
BITMTP_INLINE __m512i codes_of(const std::uint8_t* block) {
    const auto stored = [&](int index) { return _mm512_load_si512(block + 64 * index); };
    if constexpr (STEP < dense::vectors) return stored(STEP);
    const __m512i low = _mm512_srli_epi16(stored(STEP - 5), 5);
    if constexpr (STEP < 7) return select(low, _mm512_srli_epi16(stored(STEP - 2), 2), byte_masks.low[0]);
    const __m512i lower = select(low, _mm512_srli_epi16(stored(4), 4), byte_masks.low[0]);
    return select(lower, _mm512_srli_epi16(stored(3), 3), byte_masks.low[1]);
}

/// Add one step of four inputs to the sums.
template <int STEP, int TRIPLES, int COLS>
BITMTP_INLINE void dense_step(const std::uint8_t* block, std::ptrdiff_t distance, const std::int8_t* values,
                              std::ptrdiff_t row_bytes, const __m512i (&tables)[dense::tiles],
                              __m512i (&sum)[TRIPLES][dense::tiles][COLS]) {
    BITMTP_UNROLL for (int triple = 0; triple < TRIPLES; ++triple) {
        const __m512i codes = codes_of<STEP>(block + triple * distance);
        __m512i trits[dense::tiles];
        BITMTP_UNROLL for (int t = 0; t < dense::tiles; ++t) trits[t] = look_up(codes, tables[t]);
        BITMTP_UNROLL for (int c = 0; c < COLS; ++c) {
            const __m512i value = _mm512_set1_epi32(load_step(values + c * row_bytes + 4 * STEP));
            BITMTP_UNROLL for (int t = 0; t < dense::tiles; ++t) dot_step(sum[triple][t][c], trits[t], value);
        }
    }
}

/// Results of `TRIPLES` times three tiles for `COLS` rows of activations. Not inlined: among other code GCC does not keep
/// the sums in registers.
template <int TRIPLES, int COLS>
__attribute__((noinline)) static void dense_block(const PackedMatrix& matrix, const QuantRows& input, int triple,
                                                  int column, float* y, std::ptrdiff_t stride) {
    const std::ptrdiff_t distance = std::ptrdiff_t(matrix.unit_bytes()), row_bytes = input.in_padded;
    const std::uint8_t* block = matrix.codes.data() + triple * distance;
    const std::int8_t* values = input.values + column * row_bytes;
    const std::int32_t* sums = input.sums + std::ptrdiff_t(column) * matrix.groups;
    __m512i tables[dense::tiles];
    BITMTP_UNROLL for (int t = 0; t < dense::tiles; ++t) tables[t] = _mm512_load_si512(trit_tables.trit[t]);
    NativeF total[TRIPLES][dense::tiles][COLS];
    BITMTP_UNROLL for (int v = 0; v < TRIPLES; ++v)
        BITMTP_UNROLL for (int t = 0; t < dense::tiles; ++t)
            BITMTP_UNROLL for (int c = 0; c < COLS; ++c) total[v][t][c] = -NativeF{};  // -0 + x is x for every x
    constexpr int ahead_bytes = stream_ahead(TRIPLES);
    const std::uint8_t* const turn = block + distance - ahead_bytes;  // from here on the next blocks are prefetched
    for (int group = 0; group < matrix.groups; ++group) {
        __m512i sum[TRIPLES][dense::tiles][COLS];
        BITMTP_UNROLL for (int v = 0; v < TRIPLES; ++v)
            BITMTP_UNROLL for (int t = 0; t < dense::tiles; ++t)
                BITMTP_UNROLL for (int c = 0; c < COLS; ++c)
                    sum[v][t][c] = _mm512_set1_epi32(-sums[c * matrix.groups + group]);  // a trit is the weight + 1
        for (int i = 0; i < matrix.group; i += dense::inputs) {
            const std::ptrdiff_t ahead = ahead_bytes + (block < turn ? 0 : (TRIPLES - 1) * distance);
            BITMTP_UNROLL for (int v = 0; v < TRIPLES; ++v)
                BITMTP_UNROLL for (int line = 0; line < dense::vectors; ++line)
                    _mm_prefetch(reinterpret_cast<const char*>(block + v * distance + 64 * line) + ahead, _MM_HINT_T0);
            dense_step<0>(block, distance, values, row_bytes, tables, sum);
            dense_step<1>(block, distance, values, row_bytes, tables, sum);
            dense_step<2>(block, distance, values, row_bytes, tables, sum);
            dense_step<3>(block, distance, values, row_bytes, tables, sum);
            dense_step<4>(block, distance, values, row_bytes, tables, sum);
            dense_step<5>(block, distance, values, row_bytes, tables, sum);
            dense_step<6>(block, distance, values, row_bytes, tables, sum);
            dense_step<7>(block, distance, values, row_bytes, tables, sum);
            block += dense::vectors * 64;
            values += dense::inputs;
        }
        BITMTP_UNROLL for (int v = 0; v < TRIPLES; ++v)
            BITMTP_UNROLL for (int t = 0; t < dense::tiles; ++t) {
                const NativeF scale = load_factors(matrix.scales, matrix.scale_place((triple + v) * dense::tiles + t, group));
                BITMTP_UNROLL for (int c = 0; c < COLS; ++c)
                    total[v][t][c] = total[v][t][c] + __builtin_convertvector((NativeI)sum[v][t][c], NativeF) * scale;
            }
    }
    BITMTP_UNROLL for (int v = 0; v < TRIPLES; ++v)
        BITMTP_UNROLL for (int t = 0; t < dense::tiles; ++t)
            BITMTP_UNROLL for (int c = 0; c < COLS; ++c) {
                const NativeF result = total[v][t][c] * input.step[column + c];
                float* to = y + (column + c) * stride + ((triple + v) * dense::tiles + t) * tile_rows;
                std::memcpy(to, &result, sizeof result);
            }
}

/// Results of `count` groups of three tiles.
template <int TRIPLES, int COLS>
static void dense_triples(const PackedMatrix& matrix, const QuantRows& input, int triple, int count, int column, float* y,
                          std::ptrdiff_t stride) {
    if constexpr (TRIPLES > 1) {
        if (count < TRIPLES) return dense_triples<TRIPLES - 1, COLS>(matrix, input, triple, count, column, y, stride);
    }
    dense_block<TRIPLES, COLS>(matrix, input, triple, column, y, stride);
}

/// Tiles [begin, end), whole threes, for `COLS` rows of activations from `column` on: as few blocks as can be, and equal.
template <int COLS>
static void dense_columns(const PackedMatrix& matrix, const QuantRows& input, int begin, int end, int column, float* y,
                          std::ptrdiff_t stride) {
    constexpr int most = triples_at_once(COLS);
    const int first = begin / dense::tiles, count = end / dense::tiles - first, blocks = (count + most - 1) / most;
    for (int block = 0; block < blocks; ++block) {
        const int from = first + count * block / blocks, to = first + count * (block + 1) / blocks;
        dense_triples<most, COLS>(matrix, input, from, to - from, column, y, stride);
    }
}

template <int COLS = widest_dense>
static Columns dense_kernel(int count) {
    if constexpr (COLS > 1) {
        if (count < COLS) return dense_kernel<COLS - 1>(count);
    }
    return dense_columns<COLS>;
}
