// Kernels on one row of floats: norms, quantisation, rotary embedding, activation (docs/numerics.md, "Layers").
#pragma once

#include "half.hpp"
#include "kernels.hpp"

namespace bitmtp::BITMTP_ISA {

// f(i, count) for each group of 16 entries; count < 16 only for the last.
template <class F>
BITMTP_INLINE void for_lanes(int n, F&& f) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
    if (i < n) f(i, n - i);
}
BITMTP_INLINE f32x16 load_count(const float* p, int count) { return count == kLanes ? load(p) : load_head(p, count); }
BITMTP_INLINE void store_count(float* p, f32x16 x, int count) {
    if (count == kLanes) store(p, x);
    else store_head(p, x, count);
}

void norm(const float* x, const float* weight, int n, float eps, float* y) {
    const float sum = lane_sum(n, [&](int i) {
        const f32x16 v = load_padded(x, i, n);
        return v * v;
    });
    const f32x16 r = splat(1.0f / __builtin_sqrtf(sum / float(n) + eps));
    for_lanes(n, [&](int i, int count) {
        store_count(y + i, (load_count(x + i, count) * r) * load_count(weight + i, count), count);
    });
}

// Levels of 16 entries as int8; returns their lane sums for the group's total.
BITMTP_INLINE i32x16 store_levels(std::int8_t* out, f32x16 level) {
    typedef std::int8_t Bytes __attribute__((vector_size(kNative)));
    const f32x16 top = splat(127.0f);
    const f32x16 clamped = min(max(level, -top), top);
    return each<NativeI>([&](int i) {
        const NativeI whole = __builtin_convertvector(clamped.part[i], NativeI);
        const Bytes bytes = __builtin_convertvector(whole, Bytes);
        std::memcpy(out + i * kNative, &bytes, sizeof bytes);
        return whole;
    });
}

// The largest |x|, or `least` if that is larger. A maximum is the same in any order, and four chains hide their latency.
BITMTP_INLINE float largest_size(const float* x, int n, float least) {
    f32x16 largest[4];
    for (f32x16& chain : largest) chain = splat(least);
    int i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
#pragma GCC unroll 4
        for (int chain = 0; chain < 4; ++chain) largest[chain] = max(largest[chain], abs(load(x + i + chain * kLanes)));
    }
    for (; i < n; i += kLanes) largest[0] = max(largest[0], abs(load_padded(x, i, n)));
    return fold_max(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
}

// Levels of inputs [begin, end), which share a step, and the sum of each group of them.
BITMTP_INLINE void quantise_part(const float* x, const PackedMatrix& matrix, int begin, int end, float factor,
                                 std::int8_t* values, std::int32_t* sums) {
    for (int from = begin; from < end; from += matrix.group) {
        i32x16 total = {};
        const int to = from + matrix.group < end ? from + matrix.group : end;
        for (int i = from; i < to; i += kLanes) {
            total = total + store_levels(values + i, round_even(load_padded(x, i, to) * splat(factor)));
        }
        std::int32_t lanes[kLanes], sum = 0;
        std::memcpy(lanes, &total, sizeof lanes);
        for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
        sums[from / matrix.group] = sum;
    }
}

void quantise(const float* x, const PackedMatrix& matrix, const QuantRows& out, int row) {
    const int n = matrix.in, share = n / matrix.step_groups;
    std::int8_t* values = out.values + std::ptrdiff_t(row) * out.in_padded;
    for (int g = 0; g < matrix.step_groups; ++g) {
        const int begin = g * share;
        const float absmax = largest_size(x + begin, share, 1e-5f);
        quantise_part(x, matrix, begin, begin + share, 127.0f / absmax, values,
                      out.sums + std::ptrdiff_t(row) * matrix.groups);
        out.step[std::ptrdiff_t(row) * matrix.step_groups + g] = absmax / 127.0f;
    }
    for (int i = round_up(n, kLanes); i < out.in_padded; ++i) values[i] = 0;
}

void add(float* x, const float* y, int n) {
    for_lanes(n, [&](int i, int count) { store_count(x + i, load_count(x + i, count) + load_count(y + i, count), count); });
}

void rope(float* x, const float* cos, const float* sin, int n, float scale) {
    const int half = n / 2;
    for_lanes(half, [&](int i, int count) {
        const f32x16 first = load_count(x + i, count), second = load_count(x + half + i, count);
        const f32x16 c = load_count(cos + i, count), s = load_count(sin + i, count);
        store_count(x + i, (first * c - second * s) * splat(scale), count);
        store_count(x + half + i, (second * c + first * s) * splat(scale), count);
    });
}

BITMTP_INLINE f32x16 silu(f32x16 x) { return x / (splat(1.0f) + exp(-x)); }

void silu(float* x, int n) {
    for_lanes(n, [&](int i, int count) { store_count(x + i, silu(load_count(x + i, count)), count); });
}

void activate(const float* gate_up, float* out, int pairs, bool relu2) {
    for (int pair = 0; pair < pairs; ++pair) {
        const f32x16 gate = load(gate_up + 32 * pair), up = load(gate_up + 32 * pair + kLanes);
        const f32x16 positive = max(gate, splat(0.0f));
        store(out + kLanes * pair, (relu2 ? positive * positive : silu(gate)) * up);
    }
}

// Several rows side by side hide the latency of each one's chain of adds.
template <int R>
BITMTP_INLINE void dots_of(const float* a, std::ptrdiff_t stride, const float* b, int n, float* out) {
    f32x16 sums[R];
    for (int r = 0; r < R; ++r) sums[r] = load_padded(a + r * stride, 0, n) * load_padded(b, 0, n);
    for (int i = kLanes; i < n; i += kLanes) {
        const f32x16 factor = load_padded(b, i, n);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r] = sums[r] + load_padded(a + r * stride, i, n) * factor;
    }
    for (int r = 0; r < R; ++r) out[r] = fold(sums[r]);
}

void dots(const float* a, std::ptrdiff_t stride, int rows, const float* b, int n, float* out) {
    int row = 0;
    for (; row + 4 <= rows; row += 4) dots_of<4>(a + row * stride, stride, b, n, out + row);
    for (; row < rows; ++row) dots_of<1>(a + row * stride, stride, b, n, out + row);
}

float dot_half(const std::uint16_t* a, const float* b, int n) {
    return lane_sum(n, [&](int i) {
        if (i + kLanes <= n) return load(a + i) * load(b + i);
        std::uint16_t lanes[kLanes] = {};
        for (int lane = 0; i + lane < n; ++lane) lanes[lane] = a[i + lane];
        return load(lanes) * load_padded(b, i, n);
    });
}

void expand_half(const std::uint16_t* a, float* out, int n) {
    for (int i = 0; i < n; ++i) out[i] = half_to_float(a[i]);
}

}  // namespace bitmtp::BITMTP_ISA
