#include "choose.hpp"

#include <algorithm>
#include <limits>

namespace bitmtp {

namespace {

constexpr float kOut = -std::numeric_limits<float>::infinity();

// SplitMix64's finaliser.
std::uint64_t mix64(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

NoiseKey noise_key(const Choice& choice, int position) {
    const std::uint64_t text = mix64(choice.seed + 0x9e3779b97f4a7c15 * (std::uint64_t(choice.text) + 1));
    const std::uint64_t key = mix64(text + std::uint64_t(position));
    return {std::uint32_t(key), std::uint32_t(key >> 32)};
}

// Index of an id, or -1.
int locate(const Entries& entries, std::int32_t id) {
    if (entries.dense) return id >= 0 && id < entries.count ? id : -1;
    const auto* end = entries.ids + entries.count;
    const auto* at = std::find(entries.ids, end, id);
    return at == end ? -1 : int(at - entries.ids);
}

float penalise(float logit, int occurrences, const Choice& choice) {
    const float repeated = logit > 0 ? logit / choice.repetition : logit * choice.repetition;
    const float presence = occurrences > 0 ? choice.presence : 0.0f;
    return repeated - (choice.frequency * float(occurrences) + presence);
}

}  // namespace

Chooser::Chooser(const Kernels& kernels, int capacity)
    : kernels_(kernels),
      z_(round_up(capacity, 16)),
      weights_(round_up(capacity, 16)),
      maxima_(round_up(capacity, kChunk) / kChunk),
      found_(round_up(capacity, 16)) {}

int Chooser::choose(const Entries& entries, const Choice& choice, int position) {
    adjust(entries, choice);
    const Entries z = {entries.ids, z_.data(), entries.count, entries.dense};
    if (choice.temperature == 0) return largest(z);
    kernels_.divide_all(z_.data(), z.padded(), choice.temperature, z_.data());
    const float max = kernels_.maximum(z.logits, z.padded());
    return kernels_.best_noisy(z.logits, z.ids, z.padded(), max, cut(z, choice, max), choice.min_p,
                               noise_key(choice, position));
}

// Logits after penalties, bias and grammar, in `z_`; minus infinity behind the entries.
void Chooser::adjust(const Entries& entries, const Choice& choice) {
    std::copy(entries.logits, entries.logits + entries.count, z_.begin());
    std::fill(z_.begin() + entries.count, z_.begin() + entries.padded(), kOut);
    if (choice.penalised()) {
        for (std::size_t i = 0; i < choice.seen.size(); ++i) {
            const int at = locate(entries, choice.seen[i]);
            if (at >= 0) z_[at] = penalise(z_[at], choice.counts[i], choice);
        }
    }
    for (const auto& [id, value] : choice.bias) {
        const int at = locate(entries, id);
        if (at >= 0) z_[at] += value;
    }
    if (!choice.allowed.empty()) forbid(entries, choice);
}

// Minus infinity for what the grammar does not allow, unless that is all.
void Chooser::forbid(const Entries& entries, const Choice& choice) {
    const auto allows = [&](int i) { return choice.allowed[entries.ids[i] >> 5] >> (entries.ids[i] & 31) & 1; };
    int i = 0;
    while (i < entries.count && !allows(i)) ++i;
    if (i == entries.count) return;
    std::fill(z_.begin(), z_.begin() + i, kOut);
    for (; i < entries.count; ++i) {
        if (!allows(i)) z_[i] = kOut;
    }
}

int Chooser::largest(const Entries& entries) {
    const float max = kernels_.maximum(entries.logits, entries.padded());
    const int ties = kernels_.collect(entries.logits, entries.padded(), max, found_.data());
    return *std::min_element(found_.begin(), found_.begin() + ties,
                             [&](int a, int b) { return entries.ids[a] < entries.ids[b]; });
}

std::vector<int> Chooser::best(const Entries& entries, int count) {
    count = std::min(count, entries.count);
    if (count <= 0) return {};
    // The count-th largest of the chunks' maxima is no larger than the count-th largest entry.
    const int chunks = round_up(entries.padded(), kChunk) / kChunk;
    float threshold = kOut;
    if (count <= chunks) {
        kernels_.chunk_max(entries.logits, entries.padded(), maxima_.data());
        const auto nth = maxima_.begin() + count - 1;
        std::nth_element(maxima_.begin(), nth, maxima_.begin() + chunks, std::greater<>());
        threshold = *nth;
    }
    int found = kernels_.collect(entries.logits, entries.padded(), threshold, found_.data());
    while (found > 0 && found_[found - 1] >= entries.count) --found;  // padding
    const auto before = [&](int a, int b) {
        if (entries.logits[a] != entries.logits[b]) return entries.logits[a] > entries.logits[b];
        return entries.ids[a] < entries.ids[b];
    };
    std::partial_sort(found_.begin(), found_.begin() + count, found_.begin() + found, before);
    return {found_.begin(), found_.begin() + count};
}

Cut Chooser::cut(const Entries& z, const Choice& choice, float max) {
    Cut last = kNoCut;
    int limit = z.count;
    if (choice.top_k > 0 && choice.top_k < z.count) {
        limit = choice.top_k;
        const int index = best(z, limit).back();
        last = {z.logits[index], z.ids[index]};
    }
    return choice.top_p < 1 ? cut_top_p(z, choice.top_p, limit, max, last) : last;
}

Cut Chooser::cut_top_p(const Entries& z, float top_p, int limit, float max, Cut top_k) {
    kernels_.weights(z.logits, z.ids, z.padded(), max, top_k, weights_.data());
    const float enough = top_p * kernels_.blocked_sum(weights_.data(), z.padded());
    for (int count = 256;; count *= 8) {  // few entries are enough for most rows: sort no more than needed
        const std::vector<int> order = best(z, std::min(count, limit));
        float before = 0;
        for (std::size_t i = 0; i < order.size(); ++i) {
            before += weights_[order[i]];
            const bool last = before >= enough || int(i) + 1 == limit;
            if (last) return {z.logits[order[i]], z.ids[order[i]]};
        }
    }
}

}  // namespace bitmtp
