// The Python module bitmtp.core._core: texts and costs; text.py and costs.py name the fields.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "round.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using core::Costs;
using core::Event;
using core::Owner;

namespace {

using NodeTuple = std::tuple<bool, int, int, int>;  // whether it is a mask, depth, rank, parent
using OutputTuple = std::tuple<int, float, float, std::vector<std::pair<std::int32_t, float>>>;
using RowTuple = std::tuple<int, int, int, core::u64, int, int, bool, int, int>;
using SamplingTuple = std::tuple<float, int, float, float, float, float, float, std::uint64_t, int,
                                 std::vector<std::pair<std::int32_t, float>>>;

template <class From, class To>
void fill(const From& from, To* to, std::size_t capacity, const char* what) {
    if (from.size() > capacity) throw std::invalid_argument(std::string("too many ") + what);
    std::copy(from.begin(), from.end(), to);
}

core::Policy read_policy(const nb::dict& from) {
    const auto number = [&](const char* name) { return nb::cast<double>(from[name]); };
    const auto whole = [&](const char* name) { return nb::cast<int>(from[name]); };
    const auto numbers = [&](const char* name, double* to) {
        fill(nb::cast<std::vector<double>>(from[name]), to, core::MAX_BLOCK, name);
    };
    core::Policy policy = {};
    numbers("bars", policy.bars);
    numbers("temperatures", policy.temperatures);
    numbers("offsets", policy.offsets);
    policy.verify_bound = number("verify_bound");
    policy.block_size = whole("block_size");
    policy.verify = whole("verify");
    policy.min_prefix = whole("min_prefix");
    policy.adaptive = whole("adaptive");
    policy.linear = whole("linear");
    policy.ranks = whole("ranks");
    const double heat = std::min(number("temperature"), 1.0);
    policy.usual_ease = core::EASE - core::SAMPLED_EASE * heat;
    policy.usual_faith = core::FAITH - core::SAMPLED_FAITH * heat;
    const auto [sinks, recent] = nb::cast<std::pair<int, int>>(from["window"]);
    policy.window = policy.adaptive ? core::Window{core::SINKS, core::RECENT} : core::Window{sinks, recent};
    policy.shaped = whole("shaped");
    return policy;
}

SamplingTuple sampling_tuple(const Owner& self) {
    const core::Sampling& s = self.sampling;
    return {s.temperature, s.top_k, s.top_p, s.min_p, s.repetition, s.presence, s.frequency, s.seed, s.choice, s.bias};
}

core::Tree read_shape(const nb::dict& policy) {
    const auto nodes = nb::cast<std::vector<NodeTuple>>(policy["shape"]);
    if (nodes.size() > core::MAX_NODES) throw std::invalid_argument("a shape has too many nodes");
    core::Tree shape = {};
    for (const auto& [mask, depth, rank, parent] : nodes) add_node(shape, mask ? -depth : 0, parent, depth, rank);
    return shape;
}

core::Sampling read_sampling(const SamplingTuple& from) {
    core::Sampling s;
    std::tie(s.temperature, s.top_k, s.top_p, s.min_p, s.repetition, s.presence, s.frequency, s.seed, s.choice, s.bias) = from;
    return s;
}

void construct(Owner* self, const std::vector<std::int32_t>& ids, int materialized, int limit, const std::vector<int>& eos,
               const nb::dict& policy, const SamplingTuple& sampling, std::shared_ptr<Costs> costs) {
    if (ids.empty() || materialized < 0 || materialized >= int(ids.size()))
        throw std::invalid_argument("a text has at least one token that is not materialized");
    new (self) Owner(ids, materialized, limit, read_policy(policy), read_sampling(sampling), std::move(costs));
    fill(eos, self->text.eos, core::MAX_EOS, "end-of-sequence tokens");
    self->text.num_eos = int(eos.size());
    self->text.shape = read_shape(policy);
}

std::vector<RowTuple> rows(const Owner& self) {
    std::vector<RowTuple> all;
    for (int i = 0; i < self.text.plan.width; ++i) {
        const core::Row row = self.row(i);
        all.emplace_back(row.token, row.position, row.from, row.visible, row.head, row.node, row.free, row.window.sinks,
                         row.window.recent);
    }
    return all;
}

std::vector<int> absorb(Owner& self, const std::vector<OutputTuple>& given, int legal) {
    self.clear_outputs();
    for (const auto& [token, probability, entropy, top] : given) {
        self.outputs.push_back({token, probability, entropy});
        auto& ids = self.ids.emplace_back();
        auto& logits = self.logits.emplace_back();
        for (const auto& [id, logit] : top) ids.push_back(id), logits.push_back(logit);
    }
    self.absorb(legal);
    return self.kept_rows();
}

// Takes outputs that a loop has left for the host.
std::vector<int> absorb_waiting(Owner& self, int legal) {
    self.absorb(legal);
    return self.kept_rows();
}

std::vector<int> waiting_tokens(const Owner& self) {
    std::vector<int> tokens;
    for (const core::Output& output : self.outputs) tokens.push_back(output.token);
    return tokens;
}

std::vector<std::size_t> plan_round(const core::Batch& batch, const std::vector<Owner*>& texts, int width, int prompt_rows) {
    std::vector<Owner*> order = texts;
    std::vector<std::size_t> places;
    for (const Owner* each : core::plan_round(batch, order, width, prompt_rows))
        places.push_back(std::find(texts.begin(), texts.end(), each) - texts.begin());
    return places;
}

nb::list logprobs_list(const std::vector<core::Logprobs>& from) {
    nb::list all;
    for (const core::Logprobs& each : from) all.append(nb::make_tuple(each.chosen, each.top));
    return all;
}

nb::tuple event_tuple(const Event& event) {
    const core::Kept& kept = event.kept;
    const auto list = [&](const int* from) { return std::vector<int>(from, from + kept.count); };
    return nb::make_tuple(list(kept.tokens), list(kept.sources), list(kept.rows), kept.begins, kept.passes, kept.drafted,
                          kept.proposed, kept.accepted, kept.windowed, kept.copied, kept.ahead, kept.ahead_used, event.checked,
                          logprobs_list(event.logprobs));
}

nb::list take(Owner& self) {
    nb::list all;
    for (const Event& event : self.events) all.append(event_tuple(event));
    self.events.clear();
    return all;
}

nb::list take_scores(Owner& self) {
    const nb::list all = logprobs_list(self.scores);
    self.scores.clear();
    return all;
}

std::vector<int> targets(const Owner& self) {
    std::vector<int> all;
    for (int i = 0; i < self.text.plan.width; ++i) all.push_back(self.target(i));
    return all;
}

nb::bytes image(Owner& self, std::uint64_t address) {
    const std::vector<char> all = self.image(address);
    return nb::bytes(all.data(), all.size());
}

void load(Owner& self, const nb::bytes& record) {
    if (record.size() != core::RECORD_BYTES) throw std::invalid_argument("a text's record has another size");
    self.load(record.c_str());
}

// Tokens and sources of one iteration of a card's loop, and its counts: passes, drafted, proposed, copied.
void record(Owner& self, const std::vector<int>& tokens, const std::vector<int>& sources, const std::vector<int>& counts) {
    core::Kept kept = {};
    kept.count = int(tokens.size());
    if (tokens.empty()) throw std::invalid_argument("an iteration commits at least one token");
    fill(tokens, kept.tokens, core::MAX_NODES + 1, "tokens");
    fill(sources, kept.sources, core::MAX_NODES + 1, "sources");
    for (const int source : sources) kept.accepted += source != core::SOURCE_EXACT;
    kept.begins = counts.at(0), kept.passes = counts.at(1), kept.drafted = counts.at(2), kept.proposed = counts.at(3);
    kept.copied = counts.at(4);
    if (self.text.committed + kept.count > int(self.tokens.size())) throw std::invalid_argument("a text is longer than its limit");
    std::copy(tokens.begin(), tokens.end(), self.tokens.begin() + self.text.committed);
    self.text.committed += kept.count;
    self.text.status = ends_text(self.text, tokens.back()) ? core::STOP : room(self.text) <= 0 ? core::LENGTH : core::GOES_ON;
    self.record(kept);
}

nb::tuple proposals(const Owner& self) {
    std::vector<std::vector<int>> paths;
    std::vector<bool> masks;
    for (int i = 0; self.text.drafted && i < self.text.tree.count; ++i) {
        masks.push_back(self.text.tree.token[i] < 0);
        paths.push_back(self.path(i));
    }
    return nb::make_tuple(paths, masks);
}

nb::tuple seen(const Owner& self, int node) {
    const core::Seen all = self.seen_behind(node);
    return nb::make_tuple(all.ids, all.counts);
}

void make_costs(Costs* self, const std::vector<double>& milliseconds, std::pair<double, double> per_position, int history,
                bool learning, const std::vector<double>& known, const std::vector<int>& counts,
                const std::vector<std::tuple<double, double, double, int>>& far) {
    new (self) Costs{};
    std::tie(self->per_pass, self->per_row) = per_position;
    self->history = history;
    self->learning = learning;
    if (!milliseconds.empty()) {
        fill(milliseconds, self->milliseconds, core::MAX_ROWS + 1, "widths");
        self->row = (milliseconds[core::MAX_ROWS / 4] - milliseconds[1]) / (core::MAX_ROWS / 4 - 1);
        self->reach = core::MAX_ROWS;
        return;
    }
    for (double& each : self->milliseconds) each = 1.0;
    fill(known, self->known, core::KNOTS, "knots");
    fill(counts, self->counts, core::KNOTS, "knots");
    if (far.size() > 2) throw std::invalid_argument("too many averages");
    for (std::size_t i = 0; i < far.size(); ++i) {
        auto& to = self->far[i];
        std::tie(to.milliseconds, to.history, to.width, to.count) = far[i];
    }
    spread(*self);
    learn_growth(*self);
}

std::vector<int> knots() {
    std::vector<int> all;
    for (int i = 0; i < core::KNOTS; ++i) all.push_back(core::knot(i));
    return all;
}

}  // namespace

NB_MODULE(_core, module) {
    module.doc() = "What texts decide; see text.py.";
    module.attr("TEXT_BYTES") = sizeof(core::Text);
    module.attr("RECORD_BYTES") = core::RECORD_BYTES;
    module.def("image_bytes", &Owner::image_bytes, "limit"_a);
    module.attr("COSTS_BYTES") = sizeof(Costs);
    module.attr("MAX_NODES") = core::MAX_NODES;
    module.attr("MAX_RANKS") = core::MAX_RANKS;
    module.attr("KNOTS") = knots();
    nb::class_<Costs>(module, "Costs")
        .def("__init__", make_costs, "milliseconds"_a, "per_position"_a, "history"_a, "learning"_a, "known"_a, "counts"_a,
             "far"_a = std::vector<std::tuple<double, double, double, int>>())
        .def("learn", [](Costs& self, int width, int history, double ms) { learn_cost(self, width, history, ms); })
        .def("cost", [](const Costs& self, int width, int history) { return cost(self, width, history); })
        .def("image", [](const Costs& self) { return nb::bytes(&self, sizeof self); })
        .def("load", [](Costs& self, const nb::bytes& from) { std::memcpy(&self, from.c_str(), std::min(from.size(), sizeof self)); })
        .def_ro("row", &Costs::row)
        .def_ro("reach", &Costs::reach)
        .def_ro("learning", &Costs::learning)
        .def_prop_ro("far", [](const Costs& self) {
            std::vector<std::tuple<double, double, double, int>> all;
            for (const core::Far& each : self.far) all.emplace_back(each.milliseconds, each.history, each.width, each.count);
            return all;
        })
        .def_prop_ro("per_position", [](const Costs& self) { return std::pair(self.per_pass, self.per_row); })
        .def_prop_ro("known", [](const Costs& self) { return std::vector<double>(self.known, self.known + core::KNOTS); })
        .def_prop_ro("counts", [](const Costs& self) { return std::vector<int>(self.counts, self.counts + core::KNOTS); });
    nb::class_<core::Batch>(module, "Batch")
        .def("__init__", [](core::Batch* self, std::shared_ptr<Costs> costs) { new (self) core::Batch{std::move(costs)}; })
        .def("plan", plan_round)
        .def("spend", &core::Batch::spend)
        .def_prop_ro("price", &core::Batch::price);
    nb::class_<Owner>(module, "Text")
        .def("__init__", construct)
        .def("plan", [](Owner& self, int width) { self.plan(width, {0.0, 0}); return self.text.plan.width; })
        .def("rows", rows)
        .def("absorb", absorb)
        .def("absorb_waiting", absorb_waiting)
        .def("waiting_tokens", waiting_tokens)
        .def("take", take)
        .def("take_scores", take_scores)
        .def("targets", targets)
        .def("cut", &Owner::cut)
        .def("end", &Owner::end)
        .def("seen", seen)
        .def("path", &Owner::path)
        .def("proposals", proposals)
        .def("image", image)
        .def("load", load)
        .def("record", record)
        .def("attach", [](Owner& self, std::vector<std::vector<std::uint32_t>> masks) { self.masks = std::move(masks); })
        .def_ro("costs", &Owner::costs)
        .def_rw("sequence", &Owner::sequence)
        .def_rw("top", &Owner::top)
        .def_rw("scored", &Owner::scored)
        .def_rw("guarded", &Owner::guarded)
        .def_rw("ready", &Owner::ready)
        .def_rw("traced", &Owner::traced)
        .def_ro("waiting", &Owner::waiting)
        .def_prop_ro("ranks", &Owner::ranks)
        .def_prop_rw("linear", [](const Owner& self) { return self.text.policy.linear != 0; },
                     [](Owner& self, bool linear) { self.text.policy.linear = linear; })
        .def_prop_ro("running", [](const Owner& self) { return self.text.plan.running; })
        .def_prop_ro("width", [](const Owner& self) { return self.text.plan.width; })
        .def_prop_ro("drafted", [](const Owner& self) { return self.text.drafted != 0; })
        .def_prop_ro("begun", [](const Owner& self) { return begun(self.text); })
        .def_prop_ro("committed", [](const Owner& self) { return self.text.committed; })
        .def_prop_ro("materialized", [](const Owner& self) { return self.text.materialized; })
        .def_prop_ro("status", [](const Owner& self) { return self.text.status; })
        .def_prop_ro("sampling", sampling_tuple)
        .def_prop_ro("penalised", [](const Owner& self) { return self.sampling.penalised(); })
        .def_prop_ro("adaptive", [](const Owner& self) { return self.text.policy.adaptive != 0; })
        .def_prop_ro("shaped", [](const Owner& self) { return self.text.policy.shaped || (!self.text.policy.adaptive && self.text.policy.window.recent > 0); })
        .def_prop_ro("wants_windows", &Owner::wants_windows)
        .def_prop_ro("block_size", [](const Owner& self) { return self.text.policy.block_size; })
        .def_prop_ro("verify", [](const Owner& self) { return self.text.policy.verify; })
        .def_prop_ro("limit", [](const Owner& self) { return self.text.limit; })
        .def_prop_ro("num_eos", [](const Owner& self) { return self.text.num_eos; })
        .def_prop_ro("tokens", [](const Owner& self) {
            return std::vector<int>(self.tokens.begin(), self.tokens.begin() + self.text.committed);
        })
        .def_prop_ro("estimate", [](const Owner& self) {
            const core::Estimate& e = self.text.estimate;
            return nb::make_tuple(e.ease, e.faith, e.blur, e.entropy, e.offset, e.tokens, e.units);
        });
}
