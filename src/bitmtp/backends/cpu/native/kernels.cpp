// One instruction set's kernels: compiled once for each, BITMTP_ISA naming the namespace (CMakeLists.txt).
#include "kernels.hpp"

#include "attention_kernels.hpp"
#include "product_kernels.hpp"
#include "row_kernels.hpp"
#include "vocabulary_kernels.hpp"

#define BITMTP_STRING_OF(x) #x
#define BITMTP_STRING(x) BITMTP_STRING_OF(x)

namespace bitmtp::BITMTP_ISA {

namespace {
float exp_one(float x) { return exp(x); }
float log_one(float x) { return log(x); }
}  // namespace

const Kernels& kernels() {
    static constexpr Kernels table = {
        .name = BITMTP_STRING(BITMTP_ISA),
        .dense = product::takes_dense,
        .product = product_tiles,
        .norm = norm,
        .quantise = quantise,
        .add = add,
        .rope = rope,
        .activate = activate,
        .dots = dots,
        .dot_half = dot_half,
        .expand_half = expand_half,
        .silu = silu,
        .store_key = store_key,
        .store_value = store_value,
        .attend = attend,
        .merge = merge,
        .divide = divide,
        .maximum = maximum,
        .chunk_max = chunk_max,
        .collect = collect,
        .exp_sums = exp_sums,
        .weights = weights,
        .blocked_sum = blocked_sum,
        .divide_all = divide_all,
        .best_noisy = best_noisy,
        .exp = exp_one,
        .log = log_one,
    };
    return table;
}

}  // namespace bitmtp::BITMTP_ISA
