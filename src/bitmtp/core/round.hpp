// One round for many texts: who runs how many rows in the next pass, at one price for the whole batch.
#pragma once

#include <algorithm>

#include "owner.hpp"

namespace core {

/// What a batch earns.
struct Batch {
    std::shared_ptr<Costs> costs;
    double tokens = 0, milliseconds = 0;  ///< committed lately, and what the passes cost by the table

    double price() const { return milliseconds > 0 ? tokens / milliseconds : 0.0; }

    /// A pass of so many rows, of so many texts, committed so many tokens, and took so long.
    void spend(int committed, int rows, int texts, int history, double elapsed) {
        if (texts == 1 || history <= NEAR) learn_cost(*costs, rows, history, elapsed);
        const double spent = cost(*costs, rows, history), fade = exponential(-spent / (MEMORY * cost(*costs, 1, history)));
        tokens = tokens * fade + committed;
        milliseconds = milliseconds * fade + spent;
    }
};

inline bool waits(const Owner& text) { return text.text.status != GOES_ON || (text.guarded && !text.ready); }

constexpr int FEW_ROWS = 8;  // drafts of a fixed policy shrink where so many texts write that none has as many rows

/// Plan rows for texts, in their order, in at most `width` together and `prompt_rows` of prompts where others write. Returns the
/// places of the texts that run; one that finds no room is moved to the front.
inline std::vector<Owner*> plan_round(const Batch& batch, std::vector<Owner*>& texts, int width, int prompt_rows) {
    const auto writes = [](const Owner* text) { return !waits(*text) && begun(text->text); };
    int left = int(std::count_if(texts.begin(), texts.end(), writes));
    const int writing = left, share = std::max(width / std::max(writing, 1), 1);
    int rest = width, prompts = writing ? std::min(prompt_rows, width) : width;
    std::vector<Owner*> running, passed;
    for (Owner* each : texts) {
        if (waits(*each)) continue;
        const bool writer = begun(each->text);
        left -= writer;
        const int others = width - rest + left, free = std::max(rest - left, 0);
        int bound = !writer ? std::min(prompts, rest) : each->text.policy.adaptive ? free : width;
        if (writer && share < FEW_ROWS && lossless(each->text.policy)) bound = std::min(bound, share);
        if (!each->ready) each->plan(bound, {texts.size() > 1 ? batch.price() : 0.0, texts.size() > 1 ? others : 0});
        const int rows = each->text.plan.width;
        if (rows == 0 || rows > rest) {
            passed.push_back(each);
            continue;
        }
        running.push_back(each);
        rest -= rows;
        if (!writer) prompts -= rows;
    }
    std::stable_sort(texts.begin(), texts.end(), [&](Owner* a, Owner* b) {
        const auto late = [&](Owner* each) { return std::find(passed.begin(), passed.end(), each) == passed.end(); };
        return late(a) < late(b);
    });
    return running;
}

}  // namespace core
