// Exact float16 ↔ float32 conversion, 16 lanes: hardware where there is some, else integer arithmetic.
#pragma once

#include "simd.hpp"

namespace bitmtp::BITMTP_ISA {

BITMTP_INLINE uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    return u;
}
BITMTP_INLINE float float_of(uint32_t u) {
    float x;
    std::memcpy(&x, &u, sizeof x);
    return x;
}

// Finite and infinite values exactly; subnormals by a multiplication that cannot round.
BITMTP_INLINE float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
    if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    const float value = magnitude < 0x400 ? float(magnitude) * 0x1p-24f : float_of((magnitude << 13) + 0x38000000);
    return float_of(sign | bits_of(value));
}

// To nearest, ties to even; overflow gives infinity.
BITMTP_INLINE uint16_t float_to_half(float x) {
    const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
        return uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000));
    }
    const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    return uint16_t(sign | ((rounded - 0x38000000) >> 13));
}

BITMTP_INLINE f32x16 load(const uint16_t* p) {
#if defined(__AVX512F__)
    // The masked form: GCC 12 warns of an uninitialised value inside the plain one.
    return {{(NativeF)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p))}};
#elif defined(__F16C__)
    return each<NativeF>([&](int i) { return (NativeF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8 * i))); });
#elif defined(__ARM_NEON)
    return each<NativeF>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
#else
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = half_to_float(p[i]);
    return load(lanes);
#endif
}

BITMTP_INLINE void store(uint16_t* p, f32x16 x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_maskz_cvtps_ph(0xffff, (__m512)x.part[0], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    for (int i = 0; i < kParts; ++i) {
        _mm_storeu_si128((__m128i*)(p + 8 * i), _mm256_cvtps_ph((__m256)x.part[i], _MM_FROUND_TO_NEAREST_INT));
    }
#elif defined(__ARM_NEON)
    for (int i = 0; i < kParts; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.part[i])));
#else
    float lanes[kLanes];
    store(lanes, x);
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(lanes[i]);
#endif
}

}  // namespace bitmtp::BITMTP_ISA
