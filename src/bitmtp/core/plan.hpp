// What the next pass runs for a text.
#pragma once

#include "auto.hpp"

namespace core {

// One row of a pass. It sees all rows of its text before row `from` of them, and from there on those whose bits are set.
struct Row {
    u64 visible;
    int from, token, position;
    int head;  // Head
    int node;  // of the tree, whose path its penalties and its grammar follow; -1: those of the text
    int free;  // a draft's: no grammar holds it
    Window window;
};

CORE bool lossless(const Policy& policy) { return policy.verify == VERIFY_ALWAYS || policy.block_size == 1; }

CORE Window no_window() { return {0, 0}; }

CORE Row pending_row(const Text& text, int i) {
    const Plan& plan = text.plan;
    int at = text.materialized + i;
    int head = at + 1 < text.committed ? HEAD_NONE : plan.provisional ? HEAD_DRAFT : HEAD_EXACT;
    Window window = plan.provisional ? text.policy.window : no_window();
    int token = at + 1 == text.committed ? text.last : text.tokens[at];  // a card's memory is far away
    return {1ull, i, token, at, head, -1, plan.provisional, window};
}

CORE Row tree_row(const Text& text, int i) {
    const Plan& plan = text.plan;
    const Tree& tree = text.tree;
    int token = tree.token[i], position = text.committed - 1 + bits(tree.seen[i]);
    Window window = plan.provisional ? text.policy.window : no_window();
    int head = plan.provisional ? HEAD_DRAFT : HEAD_EXACT;
    return {tree.seen[i], plan.pending, token, position, head, token < 0 ? -1 : i, token < 0, window};
}

// The i-th row of the plan: pending tokens, the last of them the anchor, then the tree behind them.
CORE Row row_of(const Text& text, int i) {
    return i < text.plan.pending ? pending_row(text, i) : tree_row(text, i - text.plan.pending);
}

CORE void set_masks(Tree& tree, int count) {
    set_chain(tree, count, true, [](int i) { return -1 - i; });
}

// The block of a policy that never changes its mind; provisional where its window hides something.
CORE Draft fixed_draft(const Text& text) {
    const Window& window = text.policy.window;
    return {text.policy.block_size, window.recent > 0 && text.materialized > window.sinks + window.recent, 0.0};
}

// Decides on the next draft: `tree` holds its masks, or proposals copied from the text. `width`: rows behind the pending ones.
CORE int begin_draft(Text& text, const Costs& costs, Market market, int width, Scratch& scratch) {
    Draft draft = adaptive(text.policy) ? choose(text, costs, market, width + 1, scratch) : fixed_draft(text);
    if (draft.size == 0) {
        once([&] { text.drafted = text.copied = 1, text.known = 0; });
        return 0;
    }
    int size = least(draft.size, room(text));
    if (lossless(text.policy)) size = most(least(size, width + 1), 1);
    set_masks(text.tree, size - 1);
    return draft.windowed && size > 1;
}

// Plans at most `width` rows: a piece of what is pending, a draft, or proposals to verify. A width of 0: it has to wait for a
// wider pass, because a lossy policy's draft cannot shrink, or its text would change.
CORE void plan(Text& text, const Costs& costs, Market market, int width, Scratch& scratch) {
    int pending = num_pending(text), provisional = 0;
    bool piece = !begun(text) || pending > width;
    if (text.status != GOES_ON) width = 0;
    if (piece || width == 0) {
        int taken = least(pending, width);
        once([&] { text.plan = {taken ? PROMPT : NOTHING, taken, taken, 0, 0}; });
        return;
    }
    if (!text.drafted) provisional = begin_draft(text, costs, market, width - pending, scratch);
    int running = text.drafted ? CHECK : DRAFT, nodes = text.tree.count;
    if (lossless(text.policy)) nodes = least(nodes, width - pending);
    if (pending + nodes > width || pending + nodes == 0) running = NOTHING, pending = nodes = 0;
    once([&] { text.plan = {running, pending + nodes, pending, nodes, provisional}; });
}

}  // namespace core
