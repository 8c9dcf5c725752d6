// The only words of the core that know of lanes. As C++ there is one; as CUDA a warp runs every function, all lanes together,
// on records in shared memory. Between these words all lanes compute the same.
#pragma once

#ifdef __CUDACC__
#define CORE __device__ inline
#define CALLED __device__ __noinline__  // once in the code, however often it is used: a small kernel starts sooner
#define ROLLED _Pragma("unroll 1")
#define UNROLLED _Pragma("unroll")
#else
#include <math.h>
#define CORE inline
#define CALLED inline
#define ROLLED
#define UNROLLED
#endif

namespace core {

using u64 = unsigned long long;

CORE int least(int a, int b) { return a < b ? a : b; }
CORE int most(int a, int b) { return a > b ? a : b; }

// How many of 0 … n - 1, from the first on, hold.
template <class Holds>
CORE int prefix(int n, Holds holds) {
#ifdef __CUDACC__
    ROLLED
    for (int base = 0; base < n; base += 32) {
        int i = base + threadIdx.x;
        unsigned failing = __ballot_sync(0xffffffffu, i < n && !holds(i));
        if (failing) return base + __ffs(failing) - 1;
    }
    return n;
#else
    int length = 0;
    while (length < n && holds(length)) ++length;
    return length;
#endif
}

// act(0) … act(n - 1), in any order. What was read before it, is read before it writes; what it writes, all lanes see after.
template <class Act>
CORE void each(int n, Act act) {
#ifdef __CUDACC__
    __syncwarp();
    ROLLED
    for (int i = threadIdx.x; i < n; i += 32) act(i);
    __syncwarp();
#else
    for (int i = 0; i < n; ++i) act(i);
#endif
}

template <class Act>
CORE void once(Act act) {
    each(1, [&](int) { act(); });
}

}  // namespace core
