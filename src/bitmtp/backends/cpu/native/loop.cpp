#include "loop.hpp"

#include <chrono>

namespace bitmtp {

namespace {

using core::Owner;
using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point begun) {
    return std::chrono::duration<double, std::milli>(Clock::now() - begun).count();
}

Choice choice_of(const core::Sampling& s) {
    Choice c;
    c.temperature = s.temperature, c.top_k = s.top_k, c.top_p = s.top_p, c.min_p = s.min_p;
    c.repetition = s.repetition, c.presence = s.presence, c.frequency = s.frequency;
    c.seed = s.seed, c.text = s.choice, c.bias = s.bias;
    return c;
}

/// The rows of a pass and how they choose.
struct Pass {
    std::vector<Row> rows;
    Request request;

    void add(const Owner& text) {
        const bool own = text.sampling.penalised() || !text.masks.empty();
        int shared = -1;
        for (int i = 0; i < text.text.plan.width; ++i) {
            const core::Row row = text.row(i);
            const int target = text.target(i);
            const bool chooses = row.head != core::HEAD_NONE && target < 0;
            if (chooses && (own || shared < 0)) shared = choose(text, row, i);
            const bool windowed = row.window.recent > 0;
            rows.push_back({text.sequence, row.token, row.position, row.visible, row.from, Head(row.head), windowed,
                            row.window.sinks, row.window.recent, chooses ? shared : -1, target});
        }
        request.top = std::max({request.top, text.ranks(), text.top});
    }

private:
    int choose(const Owner& text, const core::Row& row, int i) {
        Choice choice = choice_of(text.sampling);
        if (text.sampling.penalised()) {
            core::Seen seen = text.seen_behind(row.node);
            choice.seen = std::move(seen.ids), choice.counts = std::move(seen.counts);
        }
        if (!row.free && i < int(text.masks.size())) choice.allowed = text.masks[i];
        request.choices.push_back(std::move(choice));
        return int(request.choices.size()) - 1;
    }
};

core::Logprobs logprobs_of(const Output& output, int top) {
    core::Logprobs found{double(output.raw) - output.total, {}};
    for (int i = 0; i < std::min(top, int(output.top.size())); ++i)
        found.top.emplace_back(output.top[i].first, double(output.top[i].second) - output.total);
    return found;
}

void give(Owner& text, const Output* outputs) {
    text.clear_outputs();
    for (int i = 0; i < text.text.plan.width; ++i) {
        const Output& output = outputs[i];
        text.outputs.push_back({output.token, output.probability, output.entropy});
        if (text.ranks()) {
            auto& ids = text.ids.emplace_back();
            auto& logits = text.logits.emplace_back();
            for (int k = 0; k < std::min(text.ranks(), int(output.top.size())); ++k)
                ids.push_back(output.top[k].first), logits.push_back(output.top[k].second);
        }
        if (text.top >= 0) text.logprobs.push_back(logprobs_of(output, text.top));
    }
}

/// Whether somebody wants to hear of this text now.
bool is_news(const Owner& text) {
    if (text.waiting || text.text.status != core::GOES_ON) return true;
    return !text.events.empty() && text.events.front().kept.begins;
}

/// One pass, unless there is nothing to run.
bool step(Model& model, core::Batch& batch, std::vector<Owner*>& texts, int width, int prompt_rows, Ran& ran) {
    const std::vector<Owner*> running = plan_round(batch, texts, width, prompt_rows);
    if (running.empty()) return false;
    Pass pass;
    bool writing = true, masks = false;
    int longest = 0;
    for (const Owner* text : running) {
        pass.add(*text);
        writing = writing && text->text.plan.running != core::PROMPT;
        masks = masks || (text->text.plan.running == core::DRAFT && text->text.plan.nodes > 0);
        longest = std::max(longest, text->text.materialized);
    }
    const auto begun = Clock::now();
    const std::vector<Output> outputs = model.step(pass.rows, pass.request, nullptr);
    const double elapsed = milliseconds_since(begun);
    const Output* at = outputs.data();
    int committed = 0;
    for (Owner* text : running) {
        give(*text, at);
        at += text->text.plan.width;
        if (text->guarded) {
            text->waiting = true, text->ready = false;
            continue;
        }
        const int before = text->text.committed;
        text->absorb();
        committed += text->text.committed - before;
        model.materialize(text->sequence, text->kept_rows());
    }
    if (writing) batch.spend(committed, int(pass.rows.size()), int(running.size()), longest, elapsed);
    ran.widths.push_back(int(pass.rows.size()));
    ran.milliseconds[!writing ? 0 : masks ? 1 : 2] += elapsed;
    return true;
}

}  // namespace

Ran run(Model& model, core::Batch& batch, std::vector<Owner*>& texts, int width, int prompt_rows,
                     double milliseconds) {
    Ran ran;
    const auto begun = Clock::now();
    // One more will take as long as those before it did.
    const auto fits = [&] {
        const double done = double(ran.widths.size());
        return milliseconds_since(begun) * (done + 1) <= milliseconds * done;
    };
    do {
        if (!step(model, batch, texts, width, prompt_rows, ran)) break;
    } while (std::none_of(texts.begin(), texts.end(), [](const Owner* text) { return is_news(*text); }) && fits());
    return ran;
}

}  // namespace bitmtp
