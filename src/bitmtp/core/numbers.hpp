// exp and log that give the same bits wherever they are compiled: a C library and a card round theirs differently, and a
// decision between two nearly equal choices would fall differently too. Both are right to about 1e-15.
#pragma once

#include "lanes.hpp"

namespace core {

#ifdef __CUDACC__
CORE double from_bits(u64 bits) { return __longlong_as_double((long long)bits); }
CORE u64 bits_of(double x) { return (u64)__double_as_longlong(x); }
#else
CORE double from_bits(u64 bits) { return __builtin_bit_cast(double, bits); }
CORE u64 bits_of(double x) { return __builtin_bit_cast(u64, x); }
#endif

constexpr double LN2_HIGH = 0x1.62e42fee00000p-1, LN2_LOW = 0x1.a39ef35793c76p-33;  // a product with a small integer is exact
constexpr int BIAS = 1023, MANTISSA = 52;

// Of the highest power first; the terms are literals where it is called, because a card divides slowly.
template <int N>
CORE double polynomial(const double (&terms)[N], double x) {
    double sum = terms[0];
    UNROLLED
    for (int i = 1; i < N; ++i) sum = sum * x + terms[i];
    return sum;
}

// x is cut to what a double holds.
CALLED double exponential(double x) {
    x = fmin(fmax(x, -700.0), 700.0);
    const int n = int(floor(x * 0x1.71547652b82fep0 + 0.5));
    const double r = (x - n * LN2_HIGH) - n * LN2_LOW;  // at most half of ln 2
    const double terms[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                            1.0 / 40320,      1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,
                            1.0 / 6,          1.0 / 2,         1.0,            1.0};
    return polynomial(terms, r) * from_bits(u64(BIAS + n) << MANTISSA);
}

// x > 0, and no denormal.
CALLED double logarithm(double x) {
    const u64 bits = bits_of(x);
    int n = int(bits >> MANTISSA) - BIAS;
    double m = from_bits((bits & ((1ull << MANTISSA) - 1)) | u64(BIAS) << MANTISSA);  // 1 … 2
    if (m > 1.4142135623730951) m *= 0.5, n += 1;
    const double s = (m - 1) / (m + 1);  // log m = 2 (s + s³/3 + s⁵/5 + …), |s| < 0.172
    const double terms[] = {1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11,
                            1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3,  1.0};
    return n * LN2_HIGH + (2 * s * polynomial(terms, s * s) + n * LN2_LOW);
}

}  // namespace core
