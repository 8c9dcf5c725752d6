// Policies that never change their mind: what to do with the proposals of a draft.
#pragma once

#include "text.hpp"

namespace core {

// After a draft: commit this many proposals as they are, or verify this many. One of the two is 0.
struct Decision {
    int commit, verify;
};

// The first proposal (the ordinary next token) and those after it while each reaches its bar.
template <class Guesses>
CORE int confident_prefix(const Guesses& guesses, int n, const double* bars) {
    return prefix(n, [&](int i) { return i == 0 || double(guesses[i].probability) >= bars[i]; });
}

// The longest prefix whose joint probability is at least `bound`; the first `certain` proposals are. A product in order.
template <class Guesses>
CORE int worth_verifying(const Guesses& guesses, int n, int certain, double bound) {
    double joint = 1.0;
    int length = certain;
    for (; length < n; ++length) {
        joint *= double(guesses[length].probability);
        if (joint < bound) break;
    }
    return length;
}

// With the first proposal from the exact head; `room` tokens may still be committed.
template <class Guesses>
CORE Decision decide(const Policy& policy, const Guesses& guesses, int n, int room) {
    if (n == 1) return {1, 0};
    int confident = least(confident_prefix(guesses, n, policy.bars), room);
    if (policy.verify == VERIFY_NEVER || (policy.verify == VERIFY_IF_SHORT && confident >= policy.min_prefix))
        return {confident, 0};
    // A verify pass commits at least one token of its own behind what it accepts.
    int verify = least(worth_verifying(guesses, n, 1, policy.verify_bound), room - 1);
    return verify ? Decision{0, verify} : Decision{1, 0};
}

// The proposals that the text follows: nodes of the tree's first `n`, from the text on, into `path`; returns how many. first:
// the token behind the text; chosen(i): what the row of node i says comes next.
template <class Chosen>
CORE int longest_path(const Tree& tree, int n, int linear, int first, Chosen chosen, int* path) {
    if (linear) {
        int length = prefix(n, [&](int i) { return tree.token[i] == (i ? chosen(i - 1) : first); });
        each(length, [&](int i) { path[i] = i; });
        return length;
    }
    int length = 0, at = -1, wanted = first;
    for (int i = 0; i < n; ++i) {  // parents come before children
        if (tree.parent[i] != at || tree.token[i] != wanted) continue;
        path[length++] = at = i;
        wanted = chosen(i);
    }
    return length;
}

}  // namespace core
