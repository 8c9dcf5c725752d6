// What the outputs of a text's rows commit: nothing (a piece of a prompt, a draft to verify), or the tokens of an iteration.
#pragma once

#include "plan.hpp"
#ifndef __CUDACC__
#include "trees.hpp"
#endif

namespace core {

// Outputs: outputs[row] is an Output; on the host, outputs.beside(row) its Alternatives.

CORE bool ends_text(const Text& text, int token) {
    ROLLED
    for (int i = 0; i < text.num_eos; ++i)
        if (text.eos[i] == token) return true;
    return false;
}

// The tokens in `kept`, up to one that ends the text, are text now. What lies behind that one was never proposed. Returns how
// many they are.
CALLED int commit(Text& text, Kept& kept, int written, int guesses, int proposed) {
    int count = least(prefix(written, [&](int i) { return !ends_text(text, kept.tokens[i]); }) + 1, written);
    bool stopped = ends_text(text, kept.tokens[count - 1]);
    int accepted = 0;
    ROLLED
    for (int i = 0; i < count; ++i) accepted += kept.sources[i] != SOURCE_EXACT;
    each(count, [&](int i) { text.tokens[text.committed + i] = kept.tokens[i]; });
    once([&] {
        text.last = kept.tokens[count - 1];
        text.committed += count;
        text.status = stopped ? STOP : room(text) <= 0 ? LENGTH : GOES_ON;
        kept.count = count;
        kept.accepted = accepted;
        kept.proposed = count < written ? accepted : proposed;
        kept.drafted = guesses > 0;
        kept.passes = text.passes;
    });
    return count;
}

CORE void begin_kept(Kept& kept) {
    once([&] {
        kept.count = kept.begins = kept.passes = kept.drafted = kept.proposed = kept.accepted = 0;
        kept.windowed = kept.copied = kept.ahead = kept.ahead_used = 0;
    });
}

CORE void take_pending(Text& text, History& history) {
    once([&] {
        history.pending = text.plan.pending, history.count = 0;
        text.materialized += text.plan.pending;
    });
}

// A piece of what is pending; the first token comes from a prompt's last row, before any drafting.
template <class Outputs>
CORE void absorb_piece(Text& text, const Outputs& outputs, Kept& kept, History& history) {
    take_pending(text, history);
    if (begun(text) || num_pending(text)) return;
    int row = text.plan.width - 1;
    once([&] {
        kept.tokens[0] = outputs[row].token, kept.sources[0] = SOURCE_EXACT, kept.rows[0] = row;
        kept.begins = 1;
    });
    commit(text, kept, 1, 0, 0);
}

// This pass belongs to the iteration that goes on.
CORE void count_pass(Text& text, const Prices& price) {
    const Plan& plan = text.plan;
    double units = 0.0;
    if (adaptive(text.policy))
        units = (plan.provisional ? price.at(plan.width, SPAN) : price(plan.width)) / price.one;
    once([&] {
        text.units += units;
        text.alone = text.passes == 0 && plan.width == 1;
        text.passes += 1;
        text.windowed += plan.provisional;
    });
}

CORE void end_iteration(Text& text, Kept& kept) {
    once([&] {
        kept.windowed = text.windowed, kept.copied = text.copied;
        text.units = 0;
        text.passes = text.alone = text.windowed = text.drafted = text.copied = 0;
    });
}

template <class Outputs>
CORE void set_aside(Text& text, const Outputs& outputs, int first, int count, int known) {
    if (count >= 0) set_chain(text.tree, count, false, [&](int i) { return outputs[first + i].token; });
    once([&] {
        text.drafted = 1, text.known = known, text.copied = 0;
        if (known) text.first = outputs[first];
    });
}

#ifndef __CUDACC__
// What to do with a draft where candidates or windows are in play: commit so many (at least 1), or 0: `tree` is to be verified.
template <class Outputs>
int judge_tree(Text& text, const Prices& price, const Outputs& outputs, const int* rows, int n, bool known) {
    Candidates guesses[MAX_NODES];
    for (int i = 0; i < n; ++i)
        guesses[i] = candidates_of(text, outputs[rows[i]], outputs.beside(rows[i]), text.committed + i);
    if (adaptive(text.policy)) {
        const int limit = std::min({n, std::max(room(text) - 1, 0), MAX_BLOCK});
        return set_likeliest(text, price, guesses, limit, known) < 2 && known ? 1 : 0;
    }
    if (known) {
        const Decision decision = decide(text.policy, guesses, n, room(text));
        if (decision.commit) return decision.commit;
    }
    if (text.policy.shaped) return set_static(text, guesses, n, known), known && !text.tree.count;
    const int count = std::min(worth_verifying(guesses, n, known, text.policy.verify_bound), room(text) - 1);
    set_chain(text.tree, count, false, [&](int i) { return guesses[i].token; });
    return 0;
}
#endif

// The same for chains on a card; `tree` is set by the caller. Returns {commit, verify}.
template <class Guesses>
CORE Decision judge_chain(Text& text, const Prices& price, const Guesses& guesses, int n, Scratch& scratch) {
    if (!adaptive(text.policy)) return decide(text.policy, guesses, n, room(text));
    int best = worth_a_pass(text, price, guesses, n, room(text) - 1, scratch);
    return best > 1 ? Decision{0, best} : Decision{1, 0};
}

template <class Outputs>
CORE void commit_draft(Text& text, const Outputs& outputs, int first, int count, int n, Kept& kept) {
    int proposed = lossless(text.policy) ? 0 : n - 1;
    each(count, [&](int i) {
        kept.tokens[i] = outputs[first + i].token, kept.rows[i] = first + i;
        kept.sources[i] = i ? SOURCE_CONFIDENT : SOURCE_EXACT;
    });
    commit(text, kept, count, n - 1, proposed);
    Shown shown = {0, 0, 0, n > 1, n > 1 ? outputs[first + 1].token : 0};
    if (adaptive(text.policy) && n > 1) once([&] { text.said[1] = calibrated(text.policy, 1, outputs[first + 1].probability); });
    if (adaptive(text.policy))
        learn(text, shown, kept, outputs);
    end_iteration(text, kept);
}

// After a draft: commit proposals, or set them aside to verify. Unless the draft was provisional, the pending rows are history
// now, and the first proposal is the exact head's. legal: proposals that a grammar lets stand.
template <class Outputs>
CORE void absorb_draft(Text& text, const Prices& price, const Outputs& outputs, int legal, Kept& kept, History& history,
                       Scratch& scratch) {
    int first = text.plan.pending - 1, n = least(text.plan.nodes + 1, legal);
    bool known = !text.plan.provisional;
    if (known) take_pending(text, history);
#ifndef __CUDACC__
    if (!linear(text.policy)) {
        int rows[MAX_NODES];
        for (int i = 0; i < n; ++i) rows[i] = first + i;
        const int commit = judge_tree(text, price, outputs, rows, n, known);
        if (commit) commit_draft(text, outputs, first, commit, n, kept);
        else set_aside(text, outputs, first, -1, known);
        return;
    }
#endif
    Decision decision = judge_chain(text, price, &outputs[first], n, scratch);
    if (decision.verify) set_aside(text, outputs, first, decision.verify, 1);
    else commit_draft(text, outputs, first, decision.commit, n, kept);
}

// The draft's own choices along the path: how many stood one after the other, and whether the next one fell.
CORE Shown shown_of(const Text& text, const int* path, int length) {
    const Tree& tree = text.tree;
    if (linear(text.policy)) return {text.known, text.plan.nodes, length, 0, 0};
    int stood = 0, at = -1;
    while (stood < length && tree.rank[path[stood]] == 0) at = path[stood++];
    int looked = stood;
    for (int i = 0; i < text.plan.nodes; ++i)
        if (tree.parent[i] == at && tree.rank[i] == 0 && tree.token[i] >= 0) looked = stood + 1;
    return {text.known, looked, stood, 0, 0};
}

CORE int depth_of(const Text& text) {
    if (linear(text.policy)) return text.plan.nodes;
    int depth = 0;
    for (int i = 0; i < text.plan.nodes; ++i)
        if (text.tree.token[i] >= 0) depth = most(depth, text.tree.depth[i]);
    return depth;
}

#ifndef __CUDACC__
// The pass that verified has drafted as well, behind the node that the text reached: its masks' outputs are the next draft.
template <class Outputs>
void go_on(Text& text, const Prices& price, const Outputs& outputs, int anchor, Kept& kept) {
    int rows[MAX_NODES], n = 0;
    for (int i = 0; i < text.plan.nodes; ++i) {
        if (text.tree.token[i] >= 0 || text.tree.parent[i] != anchor) continue;
        rows[n++] = text.plan.pending + i;
        anchor = i;
    }
    if (!n) return;
    kept.ahead_used = 1;
    judge_tree(text, price, outputs, rows, n, false);
    if (text.tree.count) set_aside(text, outputs, 0, -1, 0);
}
#endif

// After a verify pass: the longest path that the text follows, then the verifier's own token.
template <class Outputs>
CORE void absorb_check(Text& text, const Prices& price, const Outputs& outputs, Kept& kept, History& history) {
    const int pending = text.plan.pending, known = text.known;
    const Output first = known ? text.first : outputs[pending - 1];
    const int masks = text.tree.masks;
    int length = longest_path(text.tree, text.plan.nodes, linear(text.policy), first.token,
                              [&](int i) { return outputs[pending + i].token; }, history.nodes);
    each(length + 1, [&](int i) {
        int row = i ? pending + history.nodes[i - 1] : known ? -1 : pending - 1;
        kept.rows[i] = row;
        kept.tokens[i] = row < 0 ? first.token : outputs[row].token;
        kept.sources[i] = i == length || (known && i == 0) ? SOURCE_EXACT : SOURCE_ACCEPTED;
    });
    Shown shown = shown_of(text, history.nodes, length);
    int count = commit(text, kept, length + 1, 1, depth_of(text) - known);
    once([&] {
        history.pending = pending;
        history.count = least(length, count - 1);
        text.materialized += history.pending + history.count;
    });
    if (adaptive(text.policy)) learn(text, shown, kept, outputs);
    end_iteration(text, kept);
    if (masks) once([&] { kept.ahead = 1; });
#ifndef __CUDACC__
    if (masks && text.status == GOES_ON && history.count)
        go_on(text, price, outputs, history.nodes[history.count - 1], kept);
#endif
}

// Takes the outputs of the rows last planned.
template <class Outputs>
CORE void absorb(Text& text, const Costs& costs, Market market, const Outputs& outputs, int legal, Kept& kept, History& history,
                 Scratch& scratch) {
    int running = text.plan.running;
    begin_kept(kept);
    once([&] { history.pending = history.count = 0; });
    if (running == PROMPT) absorb_piece(text, outputs, kept, history);
    if (running == PROMPT || running == NOTHING) return;
    Prices price = {&costs, 1.0, 0.0, text.materialized, 0};
    if (adaptive(text.policy)) price = prices_of(text, costs, market);
    count_pass(text, price);
    if (running == DRAFT) absorb_draft(text, price, outputs, legal, kept, history, scratch);
    else absorb_check(text, price, outputs, kept, history);
}

}  // namespace core
