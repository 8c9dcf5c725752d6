// A turn of the adaptive header: a shared library by the system's compiler, or a kernel by NVRTC.
#include "adaptive.hpp"

#ifdef __CUDACC__
#define ENTRY extern "C" __global__
#define SHARED __shared__
#else
#define ENTRY extern "C"
#define SHARED
#endif

ENTRY void turn(decisions::Loop* loop, adaptive::Tuning* tuning, adaptive::Shaper* shaper, Pass* pass,
                const decisions::Chosen* outputs, decisions::Kept* kept, decisions::Ring* ring) {
    SHARED adaptive::Scratch scratch;
    adaptive::turn(*loop, *tuning, *shaper, *pass, outputs, *kept, *ring, {ring->received, ring->stop}, scratch);
}
