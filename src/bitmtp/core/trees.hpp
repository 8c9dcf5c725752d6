// Drafts of more than one candidate a depth, and passes that verify and draft at once: planned on the host only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "auto.hpp"

namespace core {

constexpr double UNLIKELY = 0.02;  // alternatives below this are not worth a row anywhere

// The likeliest raw logits of a row, best first.
struct Alternatives {
    const std::int32_t* ids;
    const float* logits;
    int count;
};

// What a draft says of one depth: its own choice first, then what stands beside it, and their probabilities.
struct Candidates {
    int count;
    int tokens[MAX_RANKS];
    double probabilities[MAX_RANKS];
    int token;
    double probability;  // of its own choice
};

// The sampling noise of a token (docs/sampling.md, "Choosing a token"); here it only ranks alternatives.
inline double gumbel(u64 key, int position, int id) {
    const auto mix32 = [](std::uint32_t x) {
        x = (x ^ x >> 16) * 0x7feb352du;
        x = (x ^ x >> 15) * 0x846ca68bu;
        return x ^ x >> 16;
    };
    u64 x = key + u64(position);
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    std::uint32_t h = mix32(mix32(std::uint32_t(id) * 0x9e3779b1u + std::uint32_t(x)) ^ std::uint32_t(x >> 32));
    return -logarithm(-logarithm((double(h >> 9) + 0.5) * 0x1p-23));
}

// The chosen token, then the alternatives that are not too unlikely. Under sampling they are ranked as the sample is drawn:
// with the noise of the place where the token will stand, which the verifier's row adds as well.
inline Candidates candidates_of(const Text& text, const Output& output, const Alternatives& beside, int position) {
    Candidates found = {1, {output.token}, {double(output.probability)}, output.token, double(output.probability)};
    const auto* end = beside.ids + beside.count;
    const auto own = std::find(beside.ids, end, output.token);
    if (own == end) return found;
    struct Other {
        double score, probability;
        int token;
    } others[2 * MAX_NODES];
    int n = 0;
    for (int i = 0; i < beside.count && n < 2 * MAX_NODES; ++i) {
        double gap = beside.logits[i] - beside.logits[own - beside.ids];
        double p = std::min(output.probability * exponential(std::min(gap, 50.0)), 1.0);
        if (beside.ids[i] == output.token || p < UNLIKELY) continue;
        double noise = text.temperature > 0 ? gumbel(text.noise, position, beside.ids[i]) : 0.0;
        double scale = text.temperature > 0 ? text.temperature : 1.0;
        others[n++] = {beside.logits[i] / scale + noise, p, beside.ids[i]};
    }
    std::stable_sort(others, others + n, [](const Other& a, const Other& b) { return a.score > b.score; });
    for (int i = 0; i < n && found.count < MAX_RANKS; ++i) {
        found.tokens[found.count] = others[i].token;
        found.probabilities[found.count++] = others[i].probability;
    }
    return found;
}

// The policy's own shape: the nodes that reach its bound and that the draft has a token for. `known`: the first proposal is
// certain, being the exact head's.
inline void set_static(Text& text, const Candidates* guesses, int n, bool known) {
    const Policy& policy = text.policy;
    Tree& tree = text.tree;
    tree = text.shape;
    double joint[MAX_NODES];
    for (int i = 0; i < tree.count; ++i) {
        const int depth = tree.depth[i], rank = tree.rank[i], parent = tree.parent[i];
        const bool covered = tree.token[i] >= 0 && depth <= n && rank < guesses[depth - 1].count;
        joint[i] = covered ? guesses[depth - 1].probabilities[rank] : 0.0;
        if (parent >= 0) joint[i] *= joint[parent];
        else if (known && tree.token[i] >= 0) joint[i] = rank == 0;
        if (covered) tree.token[i] = guesses[depth - 1].tokens[rank];
        const bool there = covered || tree.token[i] < 0;
        const int place = bits(tree.seen[i]);  // a mask counts its depth from its anchor
        if (!(there && joint[i] >= policy.verify_bound && place < room(text))) tree.depth[i] = 0;
    }
    keep_nodes(tree, [kept = tree](int i) { return kept.depth[i] > 0; });
}

struct Place {
    double reached;
    int depth, rank;
};

// The draft's own choices and what stands beside them by falling probability; parents come before children.
inline int places_of(Text& text, const Candidates* guesses, int n, bool known, Place* places) {
    int count = 0;
    double reached = 1.0;
    for (int depth = 1; depth <= n; ++depth) {
        const Candidates& guess = guesses[depth - 1];
        if (depth > 1 || !known) {
            for (int rank = 1; rank < std::min(guess.count, TREE_RANKS); ++rank)
                places[count++] = {reached * guess.probabilities[rank], depth, rank};
            reached *= stands(text, depth - 1, depth - known, guess.probability);
        }
        places[count++] = {reached, depth, 0};
    }
    std::sort(places, places + count, [](const Place& a, const Place& b) {
        if (a.reached != b.reached) return a.reached > b.reached;
        return a.rank != b.rank ? a.rank < b.rank : a.depth < b.depth;
    });
    return count;
}

// Behind the node where the text is likeliest to leave the tree the next draft's masks, if the pass that they may save is worth
// their rows.
inline void hang_next_draft(Text& text, const Prices& price, const Place* places, int pending) {
    Tree& tree = text.tree;
    double ends[MAX_NODES], likeliest = 0.0;
    int anchor = 0;
    for (int i = 0; i < tree.count; ++i) ends[i] = places[i].reached;
    for (int i = 0; i < tree.count; ++i)
        if (tree.parent[i] >= 0) ends[tree.parent[i]] -= places[i].reached;
    for (int i = 0; i < tree.count; ++i)
        if (ends[i] > likeliest) likeliest = ends[anchor = i];
    if (likeliest < LIKELY) return;
    const int width = tree.count + pending, block = text.policy.block_size;
    const int longest = std::min({block, room(text) - tree.depth[anchor], MAX_NODES - width}) - 1;
    const double acceptance = acceptance_of(text.estimate, false);
    double prices[MAX_BLOCK + 1], best = 0.0;
    for (int i = 0; i <= block; ++i) prices[i] = price(i + 1);
    const double plain = best_draft(acceptance, block, prices).worth;
    VerifyGain gain{acceptance, 0.0};
    gain.next(prices[0]);
    int masks = 0;
    for (int more = 1; more <= longest; ++more) {
        const double worth = likeliest * (gain.next(prices[more]) - plain) - (price(width + more) - price(width));
        if (worth > best) best = worth, masks = more;
    }
    for (int depth = 1; depth <= masks; ++depth) add_node(tree, -depth, depth == 1 ? anchor : tree.count - 1, depth, 0);
}

// The likeliest nodes, as many as are worth their rows; how many, the first proposal included.
inline int set_likeliest(Text& text, const Prices& price, const Candidates* guesses, int n, bool known) {
    Place places[MAX_BLOCK * TREE_RANKS];
    const int count = places_of(text, guesses, n, known, places), pending = known ? 0 : 1;
    double total = pending, value = known ? 0.0 : NEVER;
    int best = 0, spine[MAX_BLOCK + 1] = {-1};
    for (int width = known ? 1 : 0; width <= std::min(count, std::min(price.widest(), MAX_NODES) - pending); ++width) {
        if (width) total += places[width - 1].reached;
        const double worth = total - price(width + pending);
        if (worth > value) best = width, value = worth;
    }
    Tree& tree = text.tree;
    clear(tree);
    for (int i = 0; i < best; ++i) {
        const auto [reached, depth, rank] = places[i];
        if (rank == 0) spine[depth] = tree.count;
        add_node(tree, guesses[depth - 1].tokens[rank], spine[depth - 1], depth, rank);
    }
    if (best >= (known ? 2 : 1)) hang_next_draft(text, price, places, pending);
    return best;
}

}  // namespace core
