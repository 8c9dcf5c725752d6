// Small device functions shared by all kernels. No CUDA header is included: NVRTC then needs nothing but itself.
#pragma once

#include "pass.cuh"

#define DEVICE __device__ __forceinline__

using half_bits = unsigned short;  // an IEEE binary16, as bits

// The work of the kernel before this one may be read from here on. Until then: constants (weights), what the pass began with,
// and what the kernel before that one has written, unless the kernel before is hasty (`quantise`, `attention_merge` and some
// products are): the others wait before they let the next one start.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may be brought onto the device now; it still waits for the end of this one before it reads.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE half_bits to_half(float x) {
    half_bits h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}

DEVICE float from_half(half_bits h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}

// e^x; one definition for every kernel, so that no two of them round differently.
DEVICE float exp_(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
}

DEVICE float log_(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y * 0.693147181f;
}

// Approximate, but always alike: divisions that round correctly would take longer than the loads of a product's rows.
DEVICE float inverse_root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Sum and maximum over a warp, in every lane; the butterfly gives all lanes the same bits.
DEVICE float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
    return x;
}

DEVICE uint4 load_streaming(const uint4* p) {  // read once: do not keep it in L1
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
