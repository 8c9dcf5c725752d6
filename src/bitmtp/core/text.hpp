// The record of one text: what it is, how far it has come, what its next pass runs. Plain data and the arrays it points to, the
// same on the host and on a card; nobody else defines it (bindings.cpp says its size).
#pragma once

#include "lanes.hpp"

namespace core {

constexpr int MAX_NODES = 64;  // of a tree behind the text: one bit of visibility each
constexpr int MAX_BLOCK = 32;  // the checkpoint format's largest block
constexpr int MAX_EOS = 16;
constexpr int MAX_RANKS = 8;  // candidates of a depth

// What is computed from a row's last hidden state.
enum Head : int { HEAD_NONE = 0, HEAD_DRAFT = 1, HEAD_EXACT = 2 };
// When proposals go through a verify pass.
enum Verify : int { VERIFY_ALWAYS = 0, VERIFY_IF_SHORT = 1, VERIFY_NEVER = 2 };
// How a token came to be committed.
enum Source : int { SOURCE_EXACT = 0, SOURCE_ACCEPTED = 1, SOURCE_CONFIDENT = 2 };
// What the last plan runs.
enum Running : int { NOTHING = 0, PROMPT = 1, DRAFT = 2, CHECK = 3 };
// Whether a text goes on.
enum Status : int { GOES_ON = 0, STOP = 1, LENGTH = 2 };

// What a row sees of the history: the first `sinks` positions and the last `recent` before its own; recent 0: all.
struct Window {
    int sinks, recent;
};

// Proposals and masks behind the text, each behind its parent (-1: the text itself), which comes before it.
struct alignas(16) Tree {
    u64 seen[MAX_NODES];  // bits of the nodes that a node sees: its ancestors and itself
    int token[MAX_NODES];  // -k: mask of depth k
    signed char parent[MAX_NODES], depth[MAX_NODES], rank[MAX_NODES];
    int count, depth_of_proposals, masks;
};

// What never changes in a text.
struct Policy {
    double bars[MAX_BLOCK];  // the probability that makes each proposal of a draft confident
    double temperatures[MAX_BLOCK], offsets[MAX_BLOCK];  // calibration of proposals 1, 2, …
    double verify_bound;
    double usual_ease, usual_faith;  // log-odds of a text of which nothing is known (auto.hpp)
    int block_size, verify, min_prefix, adaptive;
    int linear;  // chains of one candidate a depth that see all of the history: what a card runs by itself
    int ranks;   // candidates of a depth that it can use
    Window window;
    int shaped, reserved;  // whether Text::shape is what is verified, at most; else the chain of the draft's own choices
};

// What is known of one text's easiness (auto.hpp).
struct Estimate {
    double ease;          // log-odds that a proposal stands if the one before it did, at an entropy of 1 nat
    double faith;         // log-odds that the text goes on as its past did, but for how much of it agrees
    double blur;          // log-odds that a window takes from its drafts
    double entropy;       // running entropy of its exact rows, in nats
    double offset;        // log-odds by which its proposals stand more often than their calibrated probabilities say
    double tokens, units;  // what was committed lately, and what it cost in passes of one row
};

// A guess that nothing verified: the text tells whether it stood.
struct Guess {
    double logit;
    int token, there;
};

// Where each run of three tokens stood: a hash chain through all ends of such runs. 0: there is none.
struct Past {
    int* heads;  // the latest end with that hash
    int* links;  // of each end, the one before it with the same hash
    int shift;   // of 32 bits of hash: what is left of them is an index into `heads`
    int known;   // ends before this one are in the chains
};

// Of a row with a head: the chosen token, its raw probability, the entropy of the row.
struct Output {
    int token;
    float probability, entropy;
};

// What the next pass runs: pending rows first, then nodes of the tree.
struct Plan {
    int running;  // Running
    int width, pending, nodes;
    int provisional;  // rows see a window and are not kept
};

struct alignas(16) Text {
    Policy policy;
    int limit;   // length of prompt and text at which it ends
    int prompt;  // tokens of it
    int num_eos, eos[MAX_EOS];
    int status, committed, materialized;
    int last;  // the token that the text ends with
    Plan plan;
    // Between a draft and its verification
    Tree tree;
    int drafted;  // proposals wait in `tree`
    int known;    // its first proposal is the exact head's own, `first`
    int copied;   // it was copied from the text
    Output first;
    double said[MAX_NODES];  // of the draft's own choice for each depth: calibrated log-odds, or a copy's chance
    // The iteration so far
    int passes, alone, windowed;
    double units;
    // What is learned
    Estimate estimate;
    Guess awaited;
    Past past;
    int seen_proposals, last_windowed;
    u64 noise;  // key of the sampling noise
    float temperature;
    int reserved[3];
    int* tokens;  // prompt and text
    Tree shape;   // the host's alone, so it comes last
};

constexpr int RECORD_BYTES = sizeof(Text) - sizeof(Tree);  // what a card works on

// On a card only chains are drafted, and a loop is compiled for one kind of policy.
#ifdef __CUDACC__
CORE constexpr bool linear(const Policy&) { return true; }
CORE constexpr bool adaptive(const Policy&) { return ADAPTIVE; }
#else
CORE bool linear(const Policy& policy) { return policy.linear; }
CORE bool adaptive(const Policy& policy) { return policy.adaptive; }
#endif

// What an iteration (or a prompt's end) committed, and what it counted.
struct Kept {
    int count;
    int tokens[MAX_NODES + 1], sources[MAX_NODES + 1];
    int rows[MAX_NODES + 1];  // of the pass that has run, whose output chose each; -1: the draft's first row chose it
    int begins;               // the first token, which no iteration counts
    int passes, drafted, proposed, accepted, windowed, copied, ahead, ahead_used;
};

// Rows of the last pass that are history now: the first `pending`, then nodes of the tree.
struct History {
    int pending, count;
    int nodes[MAX_NODES];
};

CORE int room(const Text& text) { return text.limit - text.committed; }
CORE int num_pending(const Text& text) { return text.committed - text.materialized; }
CORE bool begun(const Text& text) { return text.committed > text.prompt; }

// Trees

CORE void add_node(Tree& tree, int token, int parent, int depth, int rank) {
    int i = tree.count;
    tree.token[i] = token;
    tree.parent[i] = (signed char)parent, tree.depth[i] = (signed char)depth, tree.rank[i] = (signed char)rank;
    tree.seen[i] = 1ull << i | (parent < 0 ? 0 : tree.seen[parent]);
    if (token < 0) tree.masks += 1;
    else tree.depth_of_proposals = most(tree.depth_of_proposals, depth);
    tree.count = i + 1;
}

CORE void clear(Tree& tree) { tree.count = tree.depth_of_proposals = tree.masks = 0; }

// A chain of `count` nodes, one behind the other; token(i) of each.
template <class Token>
CORE void set_chain(Tree& tree, int count, bool masks, Token token) {
    each(count, [&](int i) {
        tree.token[i] = token(i);
        tree.parent[i] = (signed char)(i - 1), tree.depth[i] = (signed char)(i + 1), tree.rank[i] = 0;
        tree.seen[i] = ~0ull >> (63 - i);
    });
    once([&] { tree.count = count, tree.masks = masks ? count : 0, tree.depth_of_proposals = masks ? 0 : count; });
}

#ifndef __CUDACC__
// The nodes for which wanted(i), less those whose parent is not among them.
template <class Wanted>
inline void keep_nodes(Tree& tree, Wanted wanted) {
    int places[MAX_NODES];
    Tree old = tree;
    clear(tree);
    for (int i = 0; i < old.count; ++i) {
        int parent = old.parent[i];
        places[i] = wanted(i) && (parent < 0 || places[parent] >= 0) ? tree.count : -1;
        if (places[i] >= 0) add_node(tree, old.token[i], parent < 0 ? -1 : places[parent], old.depth[i], old.rank[i]);
    }
}
#endif

CORE int bits(u64 x) {
#ifdef __CUDACC__
    return __popcll(x);
#else
    return __builtin_popcountll(x);
#endif
}

}  // namespace core
