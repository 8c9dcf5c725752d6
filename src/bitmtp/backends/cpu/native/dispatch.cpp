// Which instruction set's kernels run: the best that the build holds and the machine has.
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "kernels.hpp"

#if defined(__x86_64__) && !defined(BITMTP_PORTABLE_ONLY)
#define BITMTP_X86 1
#elif defined(__aarch64__) && !defined(BITMTP_PORTABLE_ONLY)
#define BITMTP_ARM 1
#endif

#if BITMTP_ARM && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace bitmtp {

#if BITMTP_X86
namespace avx512vbmi {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
namespace avx2 {
const Kernels& kernels();
}
#elif BITMTP_ARM
namespace neon {
const Kernels& kernels();
}
#endif
namespace portable {
const Kernels& kernels();
}

namespace {

struct Build {
    const char* name;
    bool runs;
    const Kernels& (*kernels)();
};

#if BITMTP_X86
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma"); }
#elif BITMTP_ARM
bool has_dot_product() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
    return true;  // every Apple arm64 Mac
#endif
}
#endif

}  // namespace

const Kernels& select_kernels() {
    const char* wanted = std::getenv("BITMTP_ISA");
    const std::initializer_list<Build> builds = {
#if BITMTP_X86
        {"avx512vbmi", has_avx512() && __builtin_cpu_supports("avx512vbmi"), avx512vbmi::kernels},
        {"avx512", has_avx512(), avx512::kernels},
        {"avx2", has_avx2(), avx2::kernels},
#elif BITMTP_ARM
        {"neon", has_dot_product(), neon::kernels},
#endif
        {"portable", true, portable::kernels},
    };
    for (const Build& build : builds) {
        if (build.runs && (!wanted || std::strcmp(wanted, build.name) == 0)) return build.kernels();
    }
    throw std::invalid_argument("BITMTP_ISA is '" + std::string(wanted) + "', which this machine or build lacks");
}

}  // namespace bitmtp
