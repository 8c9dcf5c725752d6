// The policy `auto`: how deep to draft, what to copy, what to verify, and when not to draft at all.
//
// Every decision weighs expected tokens against the price of passes: a pass is worth running wider as long as the rows added
// bring more tokens than the same time brings elsewhere (the rule of renewal-reward processes). The price of a pass of one row
// is what this text earns in one; a further row costs what it adds to the pass that all texts share, at the price that the
// whole batch pays for a millisecond. With one text both are one. Before a draft there is only an estimate of how easy the
// text is, from what stood so far, the running entropy of the exact rows (as in entropy-guided drafting) and the text's own
// past; after it, the proposals' own probabilities say far more.
#pragma once

#include "costs.hpp"
#include "numbers.hpp"
#include "past.hpp"
#include "policy.hpp"

namespace core {

constexpr double MEMORY = 20;  // passes of one row over which the price of a token is remembered
constexpr double EASE = 1.0, SAMPLED_EASE = 1.4;  // log-odds at an entropy of 1 nat; what temperature 1 takes from them
constexpr double FAITH = 0.3, SAMPLED_FAITH = 0.5, AGREEMENT = 0.12, FAITH_RATE = 0.1;
constexpr double ENTROPY_WEIGHT = 0.4;  // log-odds that a nat of running entropy takes away
constexpr double ENTROPY_RATE = 0.5, EASE_RATE = 0.1, OFFSET_RATE = 0.1;
constexpr double DRIFT = 0.003;    // how fast an idle estimate returns to where it began, so that drafting is tried again
constexpr double FORESIGHT = 0.4;  // how much of the knowledge that a draft brings is counted on before it is made
constexpr double SUREST = 4.0;     // log-odds beyond which no acceptance is believed
constexpr double CHEAP = 0.1;      // of a narrow pass: where a further row costs more, second choices are not looked at
constexpr double LIKELY = 0.5;     // where the text ends up less often, no draft hangs
constexpr double HOST_DRIVEN = 0.5;  // milliseconds that an iteration takes longer where the host plans it
constexpr int TREE_RANKS = 3;
constexpr int SINKS = 4, RECENT = 1024, SPAN = SINKS + RECENT;
constexpr int TRIAL_REST = 4;  // passes of one row before each trial of a width whose cost is unknown

// What the whole batch pays: tokens for a millisecond, and rows of other texts in the pass. price 0: there is one text.
struct Market {
    double price;
    int others;
};

// Working memory of a plan; on a card in shared memory.
struct Scratch {
    double prices[MAX_ROWS + 2], chances[MAX_ROWS + 1];
    unsigned hashes[REMEMBERED];
};

// What passes of this text cost now, in tokens.
struct Prices {
    const Costs* costs;
    double one, millisecond;  // of a pass of one row; of a millisecond
    int history, others;

    CALLED double at(int width, int seen) const {
        return one + millisecond * (cost(*costs, others + width, seen) - cost(*costs, others + 1, history));
    }
    CORE double operator()(int width) const { return at(width, history); }
    // Rows of this text in a pass whose cost is known, or nearly: twice as wide costs twice as much at most.
    CORE int widest() const {
        int known = costs->learning ? least(2 * costs->reach, MAX_ROWS) : MAX_ROWS;
        return most(known - others, 1);
    }
};

CALLED double sigmoid(double x) { return 1 / (1 + exponential(-x)); }

CALLED double logit(double probability) {
    double inside = fmin(fmax(probability, 1e-4), 1 - 1e-4);
    return logarithm(inside / (1 - inside));
}

// Log-odds that proposal `depth` (from 1 on) stands, by what its probability is known to mean.
CALLED double calibrated(const Policy& policy, int depth, double probability) {
    int i = least(depth, MAX_BLOCK) - 1;
    return logit(probability) / policy.temperatures[i] + policy.offsets[i];
}

CALLED Prices prices_of(const Text& text, const Costs& costs, Market market) {
    const Estimate& known = text.estimate;
    double one = known.units > 0 ? fmax(known.tokens / known.units, 1.0) : 1.0;
    double alone = one / cost(costs, 1, text.materialized);
    return {&costs, one, market.price > 0 ? market.price : alone, text.materialized, market.others};
}

CORE double odds(const Estimate& known, bool windowed) {
    return known.ease - ENTROPY_WEIGHT * (known.entropy - 1) - (windowed ? known.blur : 0.0);
}

// Before a draft

struct Draft {
    int size, windowed;
    double worth;  // expected tokens of an iteration, less the price of its passes
};

// Expected gain of verifying a draft of 1, 2, … rows that is not made yet, one call for each. The first row's token is certain.
// A draft shows how far it will stand, but not surely: the gain lies between that of a verify pass of one fixed width and that
// of a pass just as wide as what will stand.
struct VerifyGain {
    double acceptance, least_gain;
    double reached = 1.0, expected = 0.0, blind = least_gain, seen = 0.0;
    int rows = 0;

    CORE double next(double price) {
        expected += reached;
        rows += 1;
        blind = fmax(blind, expected - price);
        double exactly = fmax(rows - price, least_gain);
        double gain = (1 - FORESIGHT) * blind + FORESIGHT * (seen + reached * exactly);
        seen += reached * (1 - acceptance) * exactly;
        reached *= acceptance;
        return gain;
    }
};

constexpr double NEVER = -1e30;

CORE double acceptance_of(const Estimate& known, bool windowed) { return sigmoid(fmin(odds(known, windowed), SUREST)); }

// The best draft of 1 … n proposals that sees all of the history. prices[i]: of a pass of i + 1 rows.
CORE Draft best_draft(double acceptance, int n, const double* prices) {
    VerifyGain gain{acceptance, 0.0};
    Draft best = {1, 0, 1.0 - prices[0]};
    ROLLED
    for (int size = 1; size <= n; ++size) {
        double price = prices[size - 1], worth = 1 + gain.next(price) - price;
        if (size > 1 && worth > best.worth) best = {size, 0, worth};
    }
    return best;
}

// Of one that sees a window: its first proposal is a guess, and the anchor's row runs again to check it.
CORE Draft best_windowed(double acceptance, int n, const double* prices, const Prices& price) {
    VerifyGain gain{acceptance, NEVER};
    gain.next(prices[0]);
    Draft best = {1, 1, NEVER};
    for (int size = 2; size <= n; ++size) {
        double worth = gain.next(prices[size - 1]) - price.at(size, SPAN);
        if (worth > best.worth) best = {size, 1, worth};
    }
    return best;
}

// How many of n proposals promise the most tokens less their pass's price, if that is more than `worth`; else 0. `total`:
// tokens that are certain. Behind one that promises no more, and that the text reaches with less than half of `enough`, none
// is looked at.
CALLED int best_length(const Scratch& scratch, int n, double total, double worth, double enough) {
    double reached = 1.0;
    int count = 0;
    ROLLED
    for (int i = 0; i < n; ++i) {
        reached *= scratch.chances[i];
        total += reached;
        double value = total - scratch.prices[i];
        if (value > worth) {
            worth = value;
            count = i + 1;
        } else if (reached * 2 < enough) {
            break;
        }
    }
    return count;
}

// Sets aside what followed where the text last ended so, as far as it promises more than `worth`; what repeats itself is taken
// to go on so. Returns how many tokens.
CORE int copy(Text& text, const Prices& price, int widest, double worth, Scratch& scratch) {
    Match found = match(text.past, text.tokens, text.committed, scratch.hashes);
    int n = least(least(room(text), widest), MAX_NODES) - 1;
    if (!found.shared || n < 1) return 0;
    each(n, [&](int i) {
        scratch.chances[i] = sigmoid(AGREEMENT * least(found.shared + i, LONGEST) + text.estimate.faith);
        scratch.prices[i] = price(i + 2);
    });
    int count = best_length(scratch, n, 1.0, worth, price.millisecond * price.costs->row);
    if (!count) return 0;
    int period = text.committed - found.end;
    set_chain(text.tree, count, false, [&](int i) { return text.tokens[found.end + i % period]; });
    each(count, [&](int i) { text.said[i] = scratch.chances[i]; });
    return count;
}

// A width whose cost nobody knows yet is tried now and then.
CORE int trial(const Costs& costs, int n) {
    if (!costs.learning || costs.reach >= n || costs.rested < TRIAL_REST) return 0;
    int next = costs.reach < 4 ? 4 : costs.reach < 8 ? 8 : 2 * costs.reach;
    return costs.counts[0] < TRUSTED ? 0 : least(next, n);
}

// A copy (which is set aside: the draft's size is 0), or the block that promises most.
CORE Draft choose(Text& text, const Costs& costs, Market market, int widest, Scratch& scratch) {
    int n = least(text.policy.block_size, room(text)), tried = trial(costs, least(n, widest));
    if (tried > 1) return {tried, 0, 0.0};
    Prices price = prices_of(text, costs, market);
    widest = least(widest, price.widest());
    n = least(n, widest);
    each(n + 1, [&](int i) { scratch.prices[i] = price(i + 1); });
    Draft best = best_draft(acceptance_of(text.estimate, false), n, scratch.prices);
    if (!linear(text.policy) && text.materialized > SPAN) {
        Draft blurred = best_windowed(acceptance_of(text.estimate, true), n, scratch.prices, price);
        if (blurred.worth > best.worth) best = blurred;
    }
    return copy(text, price, widest, best.worth, scratch) ? Draft{0, 0, 0.0} : best;
}

// After a draft

// Probability that the draft's own choice for a depth stands if those before it do; its log-odds are kept.
CORE double stands(Text& text, int i, int depth, double probability) {
    text.said[i] = calibrated(text.policy, depth, probability);
    return sigmoid(text.said[i] + text.estimate.offset);
}

// How many proposals of a draft to verify, the first being the exact head's; 0 or 1: none.
template <class Guesses>
CORE int worth_a_pass(Text& text, const Prices& price, const Guesses& guesses, int n, int limit, Scratch& scratch) {
    each(n, [&](int i) {
        scratch.chances[i] = i ? stands(text, i, i, guesses[i].probability) : 1.0;
        scratch.prices[i] = price(i + 1);
    });
    return best_length(scratch, least(least(n, limit), price.widest()), 0.0, 0.0, 0.0);
}

CALLED void learn_guess(Estimate& known, int& seen, double acceptance, double said, bool stood, bool windowed) {
    double early = 1.0 / (seen + 2);  // a text that begins unlike the usual is believed at once
    double news = (EASE_RATE + early) * (stood - acceptance);
    known.offset += (OFFSET_RATE + early) * (stood - sigmoid(said + known.offset));
    if (windowed) known.blur -= news;
    else known.ease += news;
    seen += 1;
}

// What an iteration showed of its proposals.
struct Shown {
    int first;   // of the proposals, the first that is a guess
    int looked;  // how many of them the text decided, from the first of all on
    int stood;   // of these, how many it took
    int skipped;  // whether the second proposal of its draft was left to the text
    int skipped_token;
};

// What the text tells of a guess that was left to it; then what stood, and what fell.
CORE void learn_drafts(const Text& text, Estimate& known, int& seen, const Shown& shown, int first_token) {
    bool windowed = text.windowed;
    double acceptance = acceptance_of(known, windowed);
    if (text.awaited.there)
        learn_guess(known, seen, acceptance, text.awaited.logit, text.awaited.token == first_token, windowed);
    ROLLED
    for (int i = shown.first; i < shown.looked && i <= shown.stood; ++i)
        learn_guess(known, seen, acceptance, text.said[i], i < shown.stood, windowed);
}

CORE void learn_copies(const Text& text, Estimate& known, const Shown& shown) {
    ROLLED
    for (int i = 0; i < shown.looked && i <= shown.stood; ++i)
        known.faith += FAITH_RATE * ((i < shown.stood) - text.said[i]);
}

// An iteration is over; what lies MEMORY passes back counts a third. A text begins as if its tokens had come one a pass.
CORE void spend(Estimate& known, int tokens, double units) {
    double before_tokens = known.units > 0 ? known.tokens : MEMORY, before_units = known.units > 0 ? known.units : MEMORY;
    double fade = exponential(-units / MEMORY);
    known.tokens = before_tokens * fade + tokens;
    known.units = before_units * fade + units;
}

// Follows the text: what stood, its entropy, what its tokens cost. outputs: of the pass that has run.
template <class Outputs>
CALLED void learn(Text& text, const Shown& shown, const Kept& kept, const Outputs& outputs) {
    int committed = kept.count;
    Estimate known = text.estimate;
    int seen = text.seen_proposals;
    spend(known, committed, text.units);
    if (text.copied) learn_copies(text, known, shown);
    else learn_drafts(text, known, seen, shown, kept.tokens[0]);
    if (text.alone) known.ease += DRIFT * (text.policy.usual_ease - known.ease);
    if (!text.windowed) known.blur -= DRIFT * known.blur;
    ROLLED
    for (int i = 0; i < committed; ++i) {
        float entropy = kept.rows[i] < 0 ? text.first.entropy : outputs[kept.rows[i]].entropy;
        known.entropy += ENTROPY_RATE * (double(entropy) - known.entropy);
    }
    Guess skipped = {shown.skipped ? text.said[1] : 0.0, shown.skipped_token, shown.skipped};
    once([&] {
        text.estimate = known;
        text.seen_proposals = seen;
        text.awaited = skipped;
    });
}

}  // namespace core
