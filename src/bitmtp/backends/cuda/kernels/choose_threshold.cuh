// The n-th largest of many keys, or the key at which a sum of weights is reached: radix descent by one block.
#pragma once

#include "choose_common.cuh"

// Where keys come from: a list, or all the logits of a row.
struct Keys {
    const u64* listed;  // null: every id of `logits`
    const float* logits;
    int count;
    float largest;  // weights are relative to it

    DEVICE u64 at(int i) const { return listed ? listed[i] : key_of(logits[i], i); }
    DEVICE u64 weight(u64 key) const { return weight_of(value_of(key) - largest); }

    // Calls `use` with every key, once, from some thread of the block.
    template <typename Use>
    DEVICE void each(Use use) const {
        constexpr int AT_ONCE = 8;  // loads in flight
        for (int base = threadIdx.x; base < count; base += AT_ONCE * blockDim.x) {
            u64 batch[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int place = base + i * blockDim.x;
                batch[i] = place < count ? at(place) : 0;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (batch[i]) use(batch[i]);
        }
    }
};

struct Digits {
    unsigned counts[256];
    unsigned low[256], high[256];  // halves of the sums: there is no fast 64-bit addition in shared memory
    u64 before;                    // of all keys above the digit found
    int digit;
    unsigned count;  // keys with that digit
    unsigned taken;
    u64 found;

    DEVICE void add(int digit, u64 weight) {
        const unsigned part = weight, old = atomicAdd(&low[digit], part);
        atomicAdd(&high[digit], (unsigned)(weight >> 32) + (old + part < old));
    }

    template <bool WEIGHED>
    DEVICE u64 sum(int digit) const {
        return WEIGHED ? (u64)high[digit] << 32 | low[digit] : counts[digit];
    }
};

// One warp: the digit, from the highest down, at which the running sum reaches `goal`.
template <bool WEIGHED>
DEVICE void find_digit(Digits& digits, u64 goal, int lane) {
    const int top = 255 - lane * 8;
    const u64 above = digits.before;
    __syncwarp();
    u64 own = 0;
    for (int i = 0; i < 8; i++) own += digits.sum<WEIGHED>(top - i);
    u64 upto = own;
    for (int step = 1; step < 32; step *= 2) {
        const u64 other = __shfl_up_sync(ALL_LANES, upto, step);
        upto += lane >= step ? other : 0;
    }
    u64 before = above + upto - own;
    if (before >= goal || before + own < goal) return;
    int digit = top;
    while (before + digits.sum<WEIGHED>(digit) < goal) before += digits.sum<WEIGHED>(digit--);
    digits.digit = digit;
    digits.count = digits.counts[digit];
    digits.before = before;
}

// The first digit is the distance from the largest in eighths: logits spread over it, as they do not over the bits of floats.
DEVICE int coarse_digit(float below) {
    const float eighths = -8.0f * below;
    return eighths < 255.0f ? 255 - (int)fmaxf(eighths, 0.0f) : 0;
}

// The keys of one coarse digit, in a list of their own.
template <typename Belongs>
DEVICE Keys narrowed(const Keys& keys, Belongs belongs, u64* list, Digits& digits) {
    if (threadIdx.x == 0) digits.taken = 0;
    __syncthreads();
    keys.each([&](u64 key) {
        if (belongs(key)) list[atomicAdd(&digits.taken, 1u)] = key;
    });
    __syncthreads();
    return {list, nullptr, (int)digits.taken, keys.largest};
}

// The least key of the shortest run of keys, from the greatest down, whose counts (or weights) add up to `goal`; keys
// below `least` are left out. 1 <= goal <= the sum of all. Every thread of the block calls it and gets the result. Where
// there is `room` for so many, the keys that share the first digit are listed: the other digits need not read the rest.
template <bool WEIGHED>
DEVICE u64 threshold(Keys keys, u64 least, u64 goal, Digits& digits, u64* list = nullptr, unsigned room = 0) {
    u64 prefix = 0;
    int coarse = -1, shift = 64;
    const auto coarse_of = [&](u64 key) { return coarse_digit(value_of(key) - keys.largest); };
    if (threadIdx.x == 0) digits.before = 0;
    for (;; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) digits.counts[i] = digits.low[i] = digits.high[i] = 0;
        __syncthreads();
        keys.each([&](u64 key) {
            const int first = coarse_of(key);
            if (key < least || (coarse >= 0 && (first != coarse || (key ^ prefix) >> shift >> 8))) return;
            const int digit = coarse < 0 ? first : key >> shift & 255;
            atomicAdd(&digits.counts[digit], 1u);
            if (WEIGHED) digits.add(digit, keys.weight(key));
        });
        __syncthreads();
        if (threadIdx.x < 32) find_digit<WEIGHED>(digits, goal, threadIdx.x);
        __syncthreads();
        if (coarse < 0) {
            coarse = digits.digit;
            if (digits.count <= room)
                keys = narrowed(keys, [&](u64 key) { return key >= least && coarse_of(key) == coarse; }, list, digits);
        } else {
            prefix |= (u64)digits.digit << shift;
        }
        if (digits.count == 1 || shift == 0) break;  // one key has these digits: no need to know its others
    }
    keys.each([&](u64 key) {
        if (key >= least && coarse_of(key) == coarse && (shift == 64 || (key ^ prefix) >> shift == 0)) digits.found = key;
    });
    __syncthreads();
    const u64 found = digits.found;
    __syncthreads();
    return found;
}
