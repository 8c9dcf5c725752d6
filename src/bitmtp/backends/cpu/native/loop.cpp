#include "loop.hpp"

#include <chrono>
#include <numeric>

namespace bitmtp {

namespace {

using decisions::Chosen;
using decisions::Kept;
using decisions::Loop;
using decisions::Planned;
using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point begun) {
    return std::chrono::duration<double, std::milli>(Clock::now() - begun).count();
}

/// A text on its way.
struct Text {
    Model& model;
    const int sequence;
    const Request& request;
    Loop loop;
    Kept kept = {};
    double draft_ms = 0, exact_ms = 0;

    void iterate() {
        draft_ms = exact_ms = 0;
        pass(decisions::draft_width(loop), decisions::draft_row,
             [&](const Chosen* outputs) { decisions::judge(loop, outputs, kept); });
        if (!loop.num_proposals) return;
        pass(loop.num_proposals, decisions::verify_row,
             [&](const Chosen* outputs) { decisions::accept(loop, outputs, kept, 1); });
    }

private:
    Row row(const Planned& planned) const {
        const Head head = planned.heard ? Head::exact : Head::none;
        return {sequence, planned.token, planned.position, planned.visible, head, false, 0, 0, loop.choice};
    }

    /// Run a pass and let the loop decide; the rows that it takes into the history are the pass's first.
    template <class Decide>
    void pass(int width, Planned (*planned)(const Loop&, int), Decide decide) {
        std::vector<Row> rows;
        for (int index = 0; index < width; ++index) rows.push_back(row(planned(loop, index)));
        const auto begun = Clock::now();
        std::vector<Chosen> outputs;
        for (const Output& output : model.step(rows, request, nullptr)) {
            outputs.push_back({output.token, output.probability, output.entropy});
        }
        (rows.back().token < 0 ? draft_ms : exact_ms) += milliseconds_since(begun);
        const int before = loop.materialized;
        decide(outputs.data());
        std::vector<int> history(loop.materialized - before);
        std::iota(history.begin(), history.end(), 0);
        model.materialize(sequence, history);
    }
};

}  // namespace

std::vector<Iteration> iterate(Model& model, int sequence, const Loop& loop, const Request& request, double milliseconds) {
    Text text{model, sequence, request, loop};
    std::vector<Iteration> done;
    const auto begun = Clock::now();
    // One more will take as long as those before it did.
    const auto fits = [&](std::size_t n) { return milliseconds_since(begun) * double(n + 1) <= milliseconds * double(n); };
    while (decisions::ended(text.loop) == decisions::RUNNING && (done.empty() || fits(done.size()))) {
        text.iterate();
        done.push_back({text.kept, text.loop, text.draft_ms, text.exact_ms});
    }
    return done;
}

}  // namespace bitmtp
