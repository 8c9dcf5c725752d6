// A text on the host: its record, the arrays behind it, its sampling, and what it committed until somebody takes it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absorb.hpp"

namespace core {

/// How tokens are chosen; bitmtp.sampling.Sampling.
struct Sampling {
    float temperature = 0;
    int top_k = 0;
    float top_p = 1, min_p = 0, repetition = 1, presence = 0, frequency = 0;
    std::uint64_t seed = 0;
    int choice = 0;
    std::vector<std::pair<std::int32_t, float>> bias;

    bool penalised() const { return repetition != 1 || presence != 0 || frequency != 0; }
};

/// Tokens of prompt and text, each once, and how often it was generated.
struct Seen {
    std::vector<std::int32_t> ids, counts;
    std::unordered_map<int, std::size_t> places;

    void add(int token, int occurrences) {
        const auto [at, fresh] = places.try_emplace(token, ids.size());
        if (fresh) ids.push_back(token), counts.push_back(0);
        counts[at->second] += occurrences;
    }
};

/// Log-probabilities of a token and of the likeliest ones.
struct Logprobs {
    double chosen = 0;
    std::vector<std::pair<std::int32_t, double>> top;
};

/// What an iteration committed; `logprobs` and the proposals that were checked (each with the number of the one that it
/// follows; -1: the text) are there if they were asked for.
struct Event {
    Kept kept;
    std::vector<std::pair<int, int>> checked;
    std::vector<Logprobs> logprobs;
};

/// The outputs of a text's rows.
struct Outputs {
    const Output* at;
    const Alternatives* alternatives;

    const Output& operator[](int row) const { return at[row]; }
    Alternatives beside(int row) const { return alternatives[row]; }
};

static_assert(offsetof(Text, shape) == RECORD_BYTES);

inline std::uint64_t mix64(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

/// A text and its memory.
struct Owner {
    Text text = {};
    Sampling sampling;
    std::shared_ptr<Costs> costs;
    std::vector<std::int32_t> tokens, heads, links;
    Seen seen;
    std::vector<Event> events;
    std::vector<std::vector<std::uint32_t>> masks;  ///< of the planned rows, where a grammar holds the text
    int sequence = 0;
    int top = -1;          ///< alternatives for log-probabilities; -1: none are wanted
    int scored = std::numeric_limits<int>::max();  ///< first token of the prompt whose log-probability is wanted
    bool guarded = false;  ///< by a grammar: the host plans it, and takes its outputs
    bool traced = false;   ///< somebody looks at its proposals
    bool ready = false;    ///< such a plan waits for a pass
    bool waiting = false;  ///< such outputs wait for the host
    std::vector<Output> outputs;
    std::vector<std::vector<std::int32_t>> ids;  ///< alternatives of each output
    std::vector<std::vector<float>> logits;
    std::vector<Logprobs> logprobs;
    std::vector<Logprobs> scores;  ///< of the prompt's tokens from `scored` on, as far as it has been read
    Market market = {};
    Logprobs first;        ///< of the draft's first row
    Scratch scratch;
    History history = {};

    Owner(const std::vector<std::int32_t>& ids, int materialized, int limit, const Policy& policy, Sampling how,
          std::shared_ptr<Costs> prices)
        : sampling(std::move(how)), costs(std::move(prices)), tokens(ids) {
        const int last = std::max(limit, int(ids.size()));
        tokens.resize(positions(last));
        heads.assign(num_heads(last), 0);
        links.assign(positions(last), 0);
        text.policy = policy;
        text.limit = limit;
        text.prompt = text.committed = int(ids.size());
        text.materialized = materialized;
        text.last = ids.back();
        text.estimate = {policy.usual_ease, policy.usual_faith, 0.0, 1.0, 0.0, 0.0, 0.0};
        text.past.shift = 32 - std::countr_zero(heads.size());
        text.past.known = GRAM;
        text.noise = mix64(sampling.seed + 0x9e3779b97f4a7c15 * (std::uint64_t(sampling.choice) + 1));
        text.temperature = sampling.temperature;
        point(tokens.data(), heads.data(), links.data());
        if (sampling.penalised())
            for (const int id : ids) seen.add(id, 0);
    }
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;

    void plan(int width, Market now) {
        market = now;
        core::plan(text, *costs, market, width, scratch);
        masks.clear();
    }

    /// The token behind the i-th planned row, if the prompt has it and its log-probability is wanted; else -1.
    int target(int i) const {
        const int next = text.materialized + i + 1;
        return i < text.plan.pending && next >= scored && next < text.prompt ? tokens[next] : -1;
    }

    /// The i-th planned row; one with a target has an output.
    Row row(int i) const {
        Row row = row_of(text, i);
        if (target(i) >= 0) row.head = HEAD_EXACT;
        return row;
    }

    /// The planned rows have run: their outputs are to be set.
    void clear_outputs() { outputs.clear(), ids.clear(), logits.clear(), logprobs.clear(); }

    /// Take the outputs of the planned rows. legal: of a draft's proposals, how many a grammar lets stand.
    void absorb(int legal = MAX_NODES) {
        if (int(outputs.size()) != text.plan.width) throw std::invalid_argument("a text wants an output for each planned row");
        std::vector<Alternatives> beside(outputs.size(), {nullptr, nullptr, 0});
        for (std::size_t i = 0; i < ids.size(); ++i) beside[i] = {ids[i].data(), logits[i].data(), int(ids[i].size())};
        Kept kept;
        const auto checked = traced && text.plan.running == CHECK ? proposals() : std::vector<std::pair<int, int>>();
        const int anchor = text.plan.pending - 1;
        for (int i = 0; i < int(logprobs.size()); ++i)
            if (target(i) >= 0) scores.push_back(logprobs[i]);
        core::absorb(text, *costs, market, Outputs{outputs.data(), beside.data()}, legal, kept, history, scratch);
        text.plan.running = NOTHING;
        ready = waiting = false;
        if (kept.count) record(kept, checked);
        if (!logprobs.empty() && anchor >= 0) first = logprobs[anchor];
    }

    /// These are text now.
    void record(const Kept& kept, std::vector<std::pair<int, int>> checked = {}) {
        Event event{kept, std::move(checked), {}};
        for (int i = 0; i < kept.count; ++i) {
            if (sampling.penalised()) seen.add(kept.tokens[i], 1);
            if (logprobs.empty()) continue;
            event.logprobs.push_back(kept.rows[i] < 0 ? first : logprobs[kept.rows[i]]);
        }
        events.push_back(std::move(event));
    }

    /// Candidates of each row that it can use. Noise can lift a token that is not among the likeliest.
    int ranks() const {
        const int ranks = text.policy.linear ? 1 : text.policy.ranks;
        const bool cheap = !text.policy.adaptive || costs->row < CHEAP * costs->milliseconds[1];
        return ranks == 1 || !cheap ? 0 : text.temperature > 0 ? 2 * ranks : ranks;
    }

    /// Whether windowed drafts behind so long a text save more than it costs that the host plans them.
    bool wants_windows() const {
        const int block = text.policy.block_size;
        const double saved = cost(*costs, block, text.committed) - cost(*costs, block, SPAN);
        return text.policy.adaptive && saved - costs->row > HOST_DRIVEN;
    }

    /// Drop the nodes of the proposals that `wanted` does not name; they are planned again.
    void cut(const std::vector<bool>& wanted) {
        if (!text.drafted) return;
        keep_nodes(text.tree, [&](int i) { return i < int(wanted.size()) && wanted[i]; });
        text.plan = {};
    }

    /// The text ends here, because the host says so; what lies behind is forgotten.
    void end(int length) {
        text.committed = std::min(text.committed, length);
        text.materialized = std::min(text.materialized, text.committed - 1);
        text.status = STOP;
        text.drafted = 0;
        events.clear();
    }

    /// The rows of the last plan that are history now.
    std::vector<int> kept_rows() const {
        std::vector<int> rows;
        for (int i = 0; i < history.pending; ++i) rows.push_back(i);
        for (int i = 0; i < history.count; ++i) rows.push_back(history.pending + history.nodes[i]);
        return rows;
    }

    /// The proposals of the planned pass, each with the number of the one that it follows.
    std::vector<std::pair<int, int>> proposals() const {
        std::vector<std::pair<int, int>> found;
        int numbers[MAX_NODES];
        for (int i = 0; i < text.plan.nodes; ++i) {
            const int parent = text.tree.parent[i];
            numbers[i] = int(found.size());
            if (text.tree.token[i] >= 0) found.emplace_back(text.tree.token[i], parent < 0 ? -1 : numbers[parent]);
        }
        return found;
    }

    /// Tokens from the text to a node of the tree, its own included.
    std::vector<int> path(int node) const {
        std::vector<int> found;
        for (int i = 0; i <= node && node >= 0; ++i)
            if (text.tree.seen[node] >> i & 1) found.push_back(text.tree.token[i]);
        return found;
    }

    /// What penalties count in front of the token that follows a node's path (-1: the text itself).
    Seen seen_behind(int node) const {
        Seen all = seen;
        for (const int token : path(node)) all.add(token, 1);
        return all;
    }

    /// The record and its arrays in one piece, as they look at this address.
    std::vector<char> image(std::uint64_t address) {
        if (text.policy.adaptive) match(text.past, text.tokens, text.committed, scratch.hashes);
        Text copy = text;
        const std::size_t places[3] = {sizeof copy, sizeof copy + bytes(tokens), sizeof copy + bytes(tokens) + bytes(heads)};
        std::vector<char> all(places[2] + bytes(links));
        const auto at = [&](int i) { return reinterpret_cast<std::int32_t*>(address + places[i]); };
        copy.tokens = at(0), copy.past.heads = at(1), copy.past.links = at(2);
        std::memcpy(all.data(), &copy, sizeof copy);
        const std::vector<std::int32_t>* arrays[3] = {&tokens, &heads, &links};
        for (int i = 0; i < 3; ++i) std::memcpy(all.data() + places[i], arrays[i]->data(), arrays[i]->size() * sizeof(std::int32_t));
        return all;
    }

    /// Bytes of the image of a text that ends at this length.
    static std::size_t image_bytes(int limit) {
        return sizeof(Text) + 2 * padded(positions(limit)) + padded(num_heads(limit));
    }

    /// The record as a card has left it; its tokens came as events.
    void load(const void* record) {
        std::memcpy(&text, record, RECORD_BYTES);
        point(tokens.data(), heads.data(), links.data());
        std::fill(heads.begin(), heads.end(), 0);
        std::fill(links.begin(), links.end(), 0);
        text.past.known = GRAM;
    }

private:
    static std::size_t padded(std::size_t count) { return (count * 4 + 15) / 16 * 16; }
    static std::size_t bytes(const std::vector<std::int32_t>& array) { return padded(array.size()); }
    static std::size_t positions(int limit) { return limit + MAX_NODES + 1; }
    static std::size_t num_heads(int limit) { return std::bit_ceil(positions(limit)); }

    void point(std::int32_t* all, std::int32_t* first_of, std::int32_t* before) {
        text.tokens = all, text.past.heads = first_of, text.past.links = before;
    }
};

}  // namespace core
