// The steps of the decision headers, one function each: a shared library by the system's compiler, or kernels by NVRTC.
#include "iteration.hpp"

#ifdef __CUDACC__
#define ENTRY extern "C" __global__
#else
#define ENTRY extern "C"
#endif

using namespace decisions;

static TWIN Control control_of(const Ring* ring) { return {ring->received, ring->stop}; }

ENTRY void begin(Loop* loop, Pass* pass, const Chosen*, Kept*, Ring* ring) { advance(*loop, *pass, control_of(ring)); }

ENTRY void judge(Loop* loop, Pass* pass, const Chosen* outputs, Kept* kept, Ring* ring) {
    after_draft(*loop, *pass, outputs, *kept, *ring, control_of(ring));
}

ENTRY void accept(Loop* loop, Pass* pass, const Chosen* outputs, Kept* kept, Ring* ring) {
    after_verify(*loop, *pass, outputs, *kept, *ring, control_of(ring));
}
