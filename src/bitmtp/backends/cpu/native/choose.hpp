// Choosing a row's token: penalties, bias, temperature, top-k, top-p, min-p, keyed noise (docs/sampling.md).
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "kernels.hpp"

namespace bitmtp {

/// Sampling parameters of one row and, for penalties, what its own path has seen. The default is greedy.
struct Choice {
    float temperature = 0;
    int top_k = 0;
    float top_p = 1;
    float min_p = 0;
    float repetition = 1;
    float presence = 0;
    float frequency = 0;
    std::uint64_t seed = 0;
    int text = 0;  ///< index of this text among several of one seed
    std::vector<std::int32_t> seen;
    std::vector<std::int32_t> counts;
    std::vector<std::pair<std::int32_t, float>> bias;
    std::vector<std::uint32_t> allowed;  ///< bit set of the ids that a grammar allows; empty: all

    /// Whether the largest raw logit decides.
    bool plain() const { return temperature == 0 && bias.empty() && allowed.empty() && !penalised(); }
    bool penalised() const { return !seen.empty() && (repetition != 1 || presence != 0 || frequency != 0); }
};

/// Logits by entry. Arrays are padded to a multiple of 16 with `kNever`.
struct Entries {
    const std::int32_t* ids;
    const float* logits;
    int count;
    bool dense;  ///< ids[i] == i

    int padded() const { return round_up(count, 16); }
};

/// Nothing is cut.
constexpr Cut kNoCut = {-std::numeric_limits<float>::infinity(), std::numeric_limits<std::int32_t>::max()};

/// Scratch memory and the steps of choosing; one for each thread.
class Chooser {
public:
    /// For up to `capacity` entries.
    Chooser(const Kernels& kernels, int capacity);

    /// Index of the entry chosen for the token that will stand at `position`.
    int choose(const Entries& entries, const Choice& choice, int position);

    /// Indices of the `count` largest logits (or of all), best first, ties to the lowest id.
    std::vector<int> best(const Entries& entries, int count);

private:
    void adjust(const Entries& entries, const Choice& choice);
    void forbid(const Entries& entries, const Choice& choice);
    int largest(const Entries& entries);
    Cut cut(const Entries& z, const Choice& choice, float max);
    Cut cut_top_p(const Entries& z, float top_p, int limit, float max, Cut top_k);

    const Kernels& kernels_;
    std::vector<float> z_;
    std::vector<float> weights_;
    std::vector<float> maxima_;
    std::vector<std::int32_t> found_;
};

}  // namespace bitmtp
