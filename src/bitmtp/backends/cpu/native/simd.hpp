// Sixteen float lanes on every instruction set, and the float primitives of docs/numerics.md.
//
// A `f32x16` is one, two or four native vectors; because the lane count never changes and every operation is one IEEE
// operation (contraction off, no fast-math), the same source gives the same bits on AVX-512, AVX2, NEON and portable
// builds. BITMTP_ISA names the namespace, so several builds of this file live in one library.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define BITMTP_INLINE inline __attribute__((always_inline))

namespace bitmtp::BITMTP_ISA {

#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
constexpr int kLanes = 16;
constexpr int kParts = kLanes / kNative;

typedef float NativeF __attribute__((vector_size(4 * kNative)));
typedef int32_t NativeI __attribute__((vector_size(4 * kNative)));
typedef uint32_t NativeU __attribute__((vector_size(4 * kNative)));

template <class V>
struct Lanes {
    V part[kParts];
};
using f32x16 = Lanes<NativeF>;
using i32x16 = Lanes<NativeI>;
using u32x16 = Lanes<NativeU>;

template <class V, class F>
BITMTP_INLINE Lanes<V> each(F&& f) {
    Lanes<V> r;
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) r.part[i] = f(i);
    return r;
}

BITMTP_INLINE f32x16 splat(float x) {
    return each<NativeF>([&](int) { return x - NativeF{}; });
}
BITMTP_INLINE u32x16 splat(uint32_t x) {
    return each<NativeU>([&](int) { return x + NativeU{}; });
}

template <class V>
BITMTP_INLINE Lanes<V> operator+(Lanes<V> a, Lanes<V> b) {
    return each<V>([&](int i) { return a.part[i] + b.part[i]; });
}
template <class V>
BITMTP_INLINE Lanes<V> operator-(Lanes<V> a, Lanes<V> b) {
    return each<V>([&](int i) { return a.part[i] - b.part[i]; });
}
template <class V>
BITMTP_INLINE Lanes<V> operator*(Lanes<V> a, Lanes<V> b) {
    return each<V>([&](int i) { return a.part[i] * b.part[i]; });
}
BITMTP_INLINE f32x16 operator/(f32x16 a, f32x16 b) {
    return each<NativeF>([&](int i) { return a.part[i] / b.part[i]; });
}
// a * b + c, rounded once.
BITMTP_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return each<NativeF>([&](int i) {
#if defined(__AVX512F__)
        return (NativeF)_mm512_fmadd_ps((__m512)a.part[i], (__m512)b.part[i], (__m512)c.part[i]);
#elif defined(__FMA__)
        return (NativeF)_mm256_fmadd_ps((__m256)a.part[i], (__m256)b.part[i], (__m256)c.part[i]);
#elif defined(__ARM_NEON)
        return (NativeF)vfmaq_f32((float32x4_t)c.part[i], (float32x4_t)a.part[i], (float32x4_t)b.part[i]);
#else
        NativeF r;
        for (int lane = 0; lane < kNative; ++lane) r[lane] = __builtin_fmaf(a.part[i][lane], b.part[i][lane], c.part[i][lane]);
        return r;
#endif
    });
}
BITMTP_INLINE f32x16 operator-(f32x16 a) {
    return each<NativeF>([&](int i) { return -a.part[i]; });
}
BITMTP_INLINE u32x16 operator^(u32x16 a, u32x16 b) {
    return each<NativeU>([&](int i) { return a.part[i] ^ b.part[i]; });
}
BITMTP_INLINE u32x16 operator>>(u32x16 a, int bits) {
    return each<NativeU>([&](int i) { return a.part[i] >> bits; });
}
// a > b ? a : b and a < b ? a : b, in one instruction where the compiler would take two.
#if defined(__AVX512F__)
BITMTP_INLINE NativeF larger(NativeF a, NativeF b) { return (NativeF)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b); }
BITMTP_INLINE NativeF smaller(NativeF a, NativeF b) { return (NativeF)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b); }
#elif defined(__AVX__)
BITMTP_INLINE NativeF larger(NativeF a, NativeF b) { return (NativeF)_mm256_max_ps((__m256)a, (__m256)b); }
BITMTP_INLINE NativeF smaller(NativeF a, NativeF b) { return (NativeF)_mm256_min_ps((__m256)a, (__m256)b); }
#else
BITMTP_INLINE NativeF larger(NativeF a, NativeF b) { return a > b ? a : b; }
BITMTP_INLINE NativeF smaller(NativeF a, NativeF b) { return a < b ? a : b; }
#endif
BITMTP_INLINE f32x16 max(f32x16 a, f32x16 b) {
    return each<NativeF>([&](int i) { return larger(a.part[i], b.part[i]); });
}
BITMTP_INLINE f32x16 min(f32x16 a, f32x16 b) {
    return each<NativeF>([&](int i) { return smaller(a.part[i], b.part[i]); });
}
BITMTP_INLINE f32x16 abs(f32x16 a) {
    return each<NativeF>([&](int i) { return (NativeF)((NativeI)a.part[i] & 0x7fffffff); });
}
// Lanes of `yes` where a < b, else of `no`.
BITMTP_INLINE f32x16 where_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) {
    return each<NativeF>([&](int i) { return a.part[i] < b.part[i] ? yes.part[i] : no.part[i]; });
}

BITMTP_INLINE f32x16 load(const float* p) {
    f32x16 r;
    std::memcpy(&r, p, sizeof r);
    return r;
}
BITMTP_INLINE u32x16 load(const int32_t* p) {
    u32x16 r;
    std::memcpy(&r, p, sizeof r);
    return r;
}
BITMTP_INLINE void store(float* p, f32x16 x) { std::memcpy(p, &x, sizeof x); }

// The first `count` lanes from memory, zeros behind them.
BITMTP_INLINE f32x16 load_head(const float* p, int count) {
    float lanes[kLanes] = {};
    for (int i = 0; i < count; ++i) lanes[i] = p[i];
    return load(lanes);
}
BITMTP_INLINE void store_head(float* p, f32x16 x, int count) {
    float lanes[kLanes];
    store(lanes, x);
    for (int i = 0; i < count; ++i) p[i] = lanes[i];
}

// Upper half onto lower half, 16 → 1.
template <class F>
BITMTP_INLINE float fold_with(f32x16 x, F&& op) {
#if defined(__AVX__)
#if defined(__AVX512F__)
    const __m512 whole = (__m512)x.part[0];
    const __m256 low = _mm512_maskz_extractf32x8_ps(0xff, whole, 0);
    const __m256 high = _mm512_maskz_extractf32x8_ps(0xff, whole, 1);
#else
    const __m256 low = (__m256)x.part[0], high = (__m256)x.part[1];
#endif
    const __m256 eight = op(low, high);
    const __m128 four = op(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = op(four, _mm_movehl_ps(four, four));
    return op(two[0], two[1]);
#else
    float lanes[kLanes];
    store(lanes, x);
#pragma GCC unroll 4
    for (int half = 8; half >= 1; half /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < half; ++i) lanes[i] = op(lanes[i], lanes[i + half]);
    }
    return lanes[0];
#endif
}
// The closing step of lane_sum.
BITMTP_INLINE float fold(f32x16 x) {
    return fold_with(x, [](auto a, auto b) { return a + b; });
}
BITMTP_INLINE float fold_max(f32x16 x) {
    return fold_with(x, [](auto a, auto b) { return a > b ? a : b; });
}

// lane_sum of f(0) … f(count - 1 groups of 16): `term(i)` gives entries i … i+15, zeros beyond n.
template <class F>
BITMTP_INLINE float lane_sum(int n, F&& term) {
    f32x16 sum = term(0);
    for (int i = kLanes; i < n; i += kLanes) sum = sum + term(i);
    return fold(sum);
}

// Entries i … i+15 of x[n], zeros beyond its end.
BITMTP_INLINE f32x16 load_padded(const float* x, int i, int n) {
    return i + kLanes <= n ? load(x + i) : load_head(x + i, n - i);
}

// 2^n for whole n in [-126, 127], from the exponent bits.
BITMTP_INLINE f32x16 power_of_two(f32x16 n) {
    return each<NativeF>([&](int i) {
        return (NativeF)((__builtin_convertvector(n.part[i], NativeI) + 127) << 23);
    });
}

// Nearest whole number, halves to even; |x| < 2^22.
BITMTP_INLINE f32x16 round_even(f32x16 x) { return (x + splat(12582912.0f)) - splat(12582912.0f); }

BITMTP_INLINE f32x16 exp(f32x16 x) {
    const f32x16 low = splat(-87.0f);
    const f32x16 clamped = min(max(x, low), splat(88.0f));
    const f32x16 n = round_even(clamped * splat(1.44269504f));
    const f32x16 r = (clamped - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    const f32x16 y = (p * (r * r) + r) + splat(1.0f);
    return where_less(x, low, splat(0.0f), y * power_of_two(n));
}
BITMTP_INLINE float exp(float x) {
    float lanes[kLanes];
    store(lanes, exp(splat(x)));
    return lanes[0];
}

BITMTP_INLINE f32x16 log(f32x16 x) {
    const f32x16 exponent = each<NativeF>([&](int i) {
        return __builtin_convertvector(((NativeI)x.part[i] >> 23) - 126, NativeF);
    });
    const f32x16 m = each<NativeF>([&](int i) {
        return (NativeF)(((NativeI)x.part[i] & 0x007fffff) | 0x3f000000);
    });
    const f32x16 half_root = splat(0.707106781186547524f), one = splat(1.0f);
    const f32x16 e = where_less(m, half_root, exponent - one, exponent);
    const f32x16 f = where_less(m, half_root, (m + m) - one, m - one);
    const f32x16 z = f * f;
    f32x16 p = splat(7.0376836292e-2f);
    p = p * f + splat(-1.1514610310e-1f);
    p = p * f + splat(1.1676998740e-1f);
    p = p * f + splat(-1.2420140846e-1f);
    p = p * f + splat(1.4249322787e-1f);
    p = p * f + splat(-1.6668057665e-1f);
    p = p * f + splat(2.0000714765e-1f);
    p = p * f + splat(-2.4999993993e-1f);
    p = p * f + splat(3.3333331174e-1f);
    f32x16 y = (p * f) * z;
    y = y + e * splat(-2.12194440e-4f);
    y = y - splat(0.5f) * z;
    return (f + y) + e * splat(0.693359375f);
}
BITMTP_INLINE float log(float x) {
    float lanes[kLanes];
    store(lanes, log(splat(x)));
    return lanes[0];
}

}  // namespace bitmtp::BITMTP_ISA
