// The adaptive policy inside the resident loop: the twin of AdaptiveShaper(linear=True) of decoding/chooser.py, of plans.py,
// of copies.py and of the decoder around them. Plain C++ and CUDA, as decisions.hpp is.
//
// Numbers are doubles and every sum is taken in Python's order, so that decisions are Python's. What stands alone (the chance
// of each proposal, the price of each width) is shared out among lanes; recurrences all lanes compute, the same.
#pragma once

#ifndef __CUDACC__
#include <math.h>
#endif

#include "iteration.hpp"

// The kernel's instructions come from far away whenever the passes between have pushed them out of the caches near by: it is
// kept small, and what several places use is there once.
#ifdef __CUDACC__
#define CALLED __device__ __noinline__
#define ROLLED _Pragma("unroll 1")
#else
#define CALLED inline
#define ROLLED
#endif

namespace adaptive {

using decisions::Chosen;
using decisions::Control;
using decisions::each;
using decisions::Kept;
using decisions::least;
using decisions::Loop;
using decisions::MAX_BLOCK;
using decisions::once;
using decisions::prefix;
using decisions::Ring;
using decisions::room;

// chooser.py
constexpr double MEMORY = 20, ENTROPY_WEIGHT = 0.4, AGREEMENT = 0.12, DRIFT = 0.003;
constexpr double ENTROPY_RATE = 0.5, EASE_RATE = 0.1, OFFSET_RATE = 0.1, FAITH_RATE = 0.1;
// plans.py
constexpr double FORESIGHT = 0.4, SUREST = 4.0;
constexpr double ODDS_STEPS = 4, PRICE_STEPS = 8, HISTORY_STEPS = 8;
// copies.py
constexpr int GRAM = 3, LONGEST = 32;

constexpr unsigned MIX = 0x9E3779B1u;  // of the hash of a gram

// Bodies of the graph's switch: a pass of each width class (1, 2, 4, … 64), and of each from 2 on a pass with masks.
constexpr int CLASSES = 7;
constexpr int NO_BODY = 2 * CLASSES - 1;

// What runs between this turn and the next.
enum Running : int { NOTHING = 0, DRAFT = 1, VERIFY = 2, COPY = 3 };

// What is known beforehand, of the machine and the model. Mirrored, like all structures here, in adaptive_layout.py.
struct alignas(16) Tuning {
    double milliseconds[MAX_WIDTH + 1];  // of a pass by its width, behind `history` positions
    double per_pass, per_row;            // what a further position of history adds to a pass, and to each of its rows
    double row;                          // what a further row of a narrow pass costs
    double usual;                        // ease of a text of which nothing is known
    double temperatures[MAX_BLOCK];      // calibration of proposals 1, 2, … behind the exact head's
    double offsets[MAX_BLOCK];
    int history;
    int reserved;
};

// The text, and where each of its grams stood: a hash chain through all ends of grams. 0: there is none.
struct Past {
    int* heads;  // the latest end with that hash
    int* links;  // of each end, the one before it with the same hash
    int* text;   // prompt and text
    int shift;   // of 32 bits of hash: what is left of them is an index into `heads`
    int known;   // ends before this one are in the chains
};

// As Estimate of chooser.py; no window, no blur.
struct Estimate {
    double ease, faith, entropy, offset, tokens, milliseconds;
};

// A guess that nothing verified: the text tells whether it stood.
struct Guess {
    int token;
    int there;
    double logit;
};

// What is known of one text, and what of its iteration the next turn has to know.
struct alignas(16) Shaper {
    Past past;
    Estimate estimate;
    Guess awaited;
    double said[MAX_WIDTH];  // of each proposal of a draft its calibrated log-odds, of a copied one its chance to stand
    float first_entropy;     // of the exact row that chose the first proposal of a draft
    int seen;                // proposals of which it is known whether they stood
    int running;             // Running
    int draft_width;
    int body;  // of the graph's switch
    int reserved[3];
};

// Working memory.
struct Scratch {
    double costs[MAX_WIDTH];
    double chances[MAX_WIDTH];
    unsigned hashes[MAX_WIDTH];
};

// What passes cost behind this history, and what a millisecond is worth now.
struct Moment {
    double fixed, a_row, price;
};

// The next draft and what it promises.
struct Plan {
    int size;
    double worth;
};

struct Match {
    int shared, end;
};

// costs.py

CALLED double exponential(double x) { return exp(x); }

TWIN double sigmoid(double x) { return 1 / (1 + exponential(-x)); }

TWIN double logit(double probability) {
    double inside = fmin(fmax(probability, 1e-4), 1 - 1e-4);
    return log(inside / (1 - inside));
}

// Of proposal `depth`, the exact head's being 0.
TWIN double calibrated(const Tuning& tuning, int depth, double probability) {
    return logit(probability) / tuning.temperatures[depth - 1] + tuning.offsets[depth - 1];
}

TWIN double table_cost(const Tuning& tuning, int width, int history) {
    return tuning.milliseconds[width] + (history - tuning.history) * (tuning.per_pass + tuning.per_row * width);
}

// plans.py

// The best draft of 1 … most proposals at the rounded moment.
TWIN Plan best_draft(const Tuning& tuning, double odds, double price, int history, int most, Scratch& scratch) {
    double level = rint(HISTORY_STEPS * log2(1 + history / 64.0)), usual = 1 / table_cost(tuning, 1, history);
    double odds_key = rint(ODDS_STEPS * fmin(odds, SUREST)), price_key = rint(PRICE_STEPS * price / usual);
    int near = int(rint(64 * (exp2(level / HISTORY_STEPS) - 1)));
    double worth = price_key / PRICE_STEPS / table_cost(tuning, 1, near), acceptance = sigmoid(odds_key / ODDS_STEPS);
    each(most, [&](int i) { scratch.costs[i] = worth * table_cost(tuning, i + 1, near); });
    double reached = 1.0, expected = 0.0, blind = 0.0, seen = 0.0;
    Plan best = {1, 1.0 - scratch.costs[0]};
    ROLLED
    for (int size = 1; size <= most; ++size) {
        double cost = scratch.costs[size - 1], exactly = fmax(size - cost, 0.0);
        expected += reached;
        blind = fmax(blind, expected - cost);
        double gain = (1 - FORESIGHT) * blind + FORESIGHT * (seen + reached * exactly), value = 1 + gain - cost;
        if (size > 1 && value > best.worth) best = {size, value};
        seen += reached * (1 - acceptance) * exactly;
        reached *= acceptance;
    }
    return best;
}

// copies.py

// A run of GRAM tokens by where it ends.
TWIN unsigned hash(const Past& past, int end) {
    unsigned mixed = 0;
    ROLLED
    for (int i = end - GRAM; i < end; ++i) mixed = (mixed + unsigned(past.text[i])) * MIX;
    return mixed >> past.shift;
}

TWIN bool same_gram(const int* text, int a, int b) {
    ROLLED
    for (int i = 1; i <= GRAM; ++i)
        if (text[a - i] != text[b - i]) return false;
    return true;
}

// Brings the ends before `length` into the chains, at most as many as a pass commits: each is linked to the latest before it
// with its hash, among the new ones or in the chains; then the last of each hash becomes its head.
TWIN void remember(Past& past, int length, Scratch& scratch) {
    int first = past.known, count = length - first;
    if (count <= 0) return;
    unsigned* hashes = scratch.hashes;
    each(count, [&](int i) { hashes[i] = hash(past, first + i); });
    each(count, [&](int i) {
        int other = i - 1;
        ROLLED
        while (other >= 0 && hashes[other] != hashes[i]) --other;
        past.links[first + i] = other >= 0 ? first + other : past.heads[hashes[i]];
    });
    each(count, [&](int i) {
        int other = i + 1;
        ROLLED
        while (other < count && hashes[other] != hashes[i]) ++other;
        if (other == count) past.heads[hashes[i]] = first + i;
    });
    once([&] { past.known = length; });
}

// As Past.match of copies.py; `length`: of the text.
TWIN Match match(Past& past, int length, Scratch& scratch) {
    remember(past, length, scratch);
    if (length <= GRAM) return {0, 0};
    const int* text = past.text;
    int end = past.heads[hash(past, length)];
    ROLLED
    while (end && !same_gram(text, end, length)) end = past.links[end];
    if (!end) return {0, 0};
    int further = prefix(least(LONGEST, end) - GRAM,
                         [&](int i) { return text[end - 1 - GRAM - i] == text[length - 1 - GRAM - i]; });
    return {GRAM + further, end};
}

// chooser.py

TWIN double cost(const Tuning& tuning, const Moment& moment, int width) {
    return tuning.milliseconds[width] + moment.fixed + moment.a_row * width;
}

CALLED Moment moment_of(const Tuning& tuning, const Estimate& estimate, int history) {
    int further = history - tuning.history;
    Moment moment = {further * tuning.per_pass, further * tuning.per_row, 0.0};
    double lowest = 1 / cost(tuning, moment, 1);
    bool spent = estimate.milliseconds != 0;
    moment.price = spent ? fmax(estimate.tokens / estimate.milliseconds, lowest) : lowest;
    return moment;
}

TWIN double odds(const Estimate& estimate) { return estimate.ease - ENTROPY_WEIGHT * (estimate.entropy - 1); }

// How many of n proposals promise the most tokens less their pass's price, if that is more than `worth`; else 0. Chances and
// prices are in `scratch`; `total`: tokens that are certain. Behind one that promises no more, and that the text reaches with
// less than half of `enough`, none is looked at.
CALLED int best_length(const Scratch& scratch, int n, double total, double worth, double enough) {
    double reached = 1.0;
    int count = 0;
    ROLLED
    for (int i = 0; i < n; ++i) {
        reached *= scratch.chances[i];
        total += reached;
        double value = total - scratch.costs[i];
        if (value > worth) {
            worth = value;
            count = i + 1;
        } else if (reached * 2 < enough) {
            break;
        }
    }
    return count;
}

// How many tokens to copy, if they promise more than `worth`; else 0. Their chances are left in scratch.chances.
TWIN int worth_copying(const Tuning& tuning, const Estimate& estimate, const Moment& moment, int shared, int most,
                       double worth, Scratch& scratch) {
    each(most - 1, [&](int i) {
        scratch.chances[i] = sigmoid(AGREEMENT * least(shared + i, LONGEST) + estimate.faith);
        scratch.costs[i] = moment.price * cost(tuning, moment, i + 2);
    });
    return best_length(scratch, most - 1, 1.0, worth, moment.price * tuning.row);
}

// How many proposals of a draft of n to verify; 0 or 1: none, the first is committed as it is. Their log-odds are left in
// shaper.said.
TWIN int worth_verifying(const Tuning& tuning, const Moment& moment, const Chosen* proposals, int n, int most, Shaper& shaper,
                         Scratch& scratch) {
    double offset = shaper.estimate.offset;
    each(n, [&](int i) {
        if (i) shaper.said[i] = calibrated(tuning, i, double(proposals[i].probability));
        scratch.chances[i] = i ? sigmoid(shaper.said[i] + offset) : 1.0;
        scratch.costs[i] = moment.price * cost(tuning, moment, i + 1);
    });
    return best_length(scratch, least(n, most), 0.0, 0.0, 0.0);
}

TWIN void spend(Estimate& estimate, int tokens, double milliseconds, double memory) {
    if (estimate.milliseconds == 0) {
        estimate.tokens = MEMORY;
        estimate.milliseconds = memory;
    }
    double fade = exponential(-milliseconds / memory);
    estimate.tokens = estimate.tokens * fade + tokens;
    estimate.milliseconds = estimate.milliseconds * fade + milliseconds;
}

// A proposal stood or fell. `acceptance`: what was expected of it before this iteration.
TWIN void learn_guess(Estimate& estimate, int& seen, double acceptance, double said, bool stood) {
    double early = 1.0 / (seen + 2);
    estimate.offset += (OFFSET_RATE + early) * (stood - sigmoid(said + estimate.offset));
    estimate.ease += (EASE_RATE + early) * (stood - acceptance);
    seen += 1;
}

// What an iteration showed.
struct Iteration {
    int running;   // Running: of its last pass
    int proposed;  // proposals that were verified; 0: none
    int stood;     // of these, how many
    int skipped;   // whether it left the second proposal of its draft to the text
    double spent;  // milliseconds
    bool alone;    // a single pass of a single row
};

TWIN double learn_entropy(double entropy, const Iteration& iteration, const Chosen* outputs, int count, float first) {
    int before = iteration.running == VERIFY;  // the first token's row was in the pass before
    ROLLED
    for (int i = 0; i < count; ++i)
        entropy += ENTROPY_RATE * (double(i < before ? first : outputs[i - before].entropy) - entropy);
    return entropy;
}

// What the text tells of a guess that was left to it; then what stood, and what fell.
TWIN void learn_drafts(Estimate& estimate, int& seen, const Shaper& shaper, const Iteration& iteration, int first_token) {
    double acceptance = sigmoid(fmin(odds(estimate), SUREST));
    const Guess& awaited = shaper.awaited;
    ROLLED
    for (int i = awaited.there ? 0 : 1; i == 0 || (i < iteration.proposed && i <= iteration.stood); ++i) {
        bool stood = i ? i < iteration.stood : awaited.token == first_token;
        learn_guess(estimate, seen, acceptance, i ? shaper.said[i] : awaited.logit, stood);
    }
}

TWIN void learn_copies(Estimate& estimate, const Shaper& shaper, const Iteration& iteration) {
    ROLLED
    for (int i = 0; i < iteration.proposed && i <= iteration.stood; ++i)
        estimate.faith += FAITH_RATE * ((i < iteration.stood) - shaper.said[i]);
}

// As AdaptiveShaper.learn. outputs: of the pass that has run.
TWIN void learn(const Tuning& tuning, Shaper& shaper, const Moment& moment, const Iteration& iteration, const Chosen* outputs,
                const Kept& kept) {
    Estimate estimate = shaper.estimate;
    int seen = shaper.seen;
    spend(estimate, kept.count, iteration.spent, MEMORY * cost(tuning, moment, 1));
    if (iteration.running == COPY) learn_copies(estimate, shaper, iteration);
    else learn_drafts(estimate, seen, shaper, iteration, kept.tokens[0]);
    if (iteration.alone) estimate.ease += DRIFT * (tuning.usual - estimate.ease);
    estimate.entropy = learn_entropy(estimate.entropy, iteration, outputs, kept.count, shaper.first_entropy);
    Guess skipped = {iteration.skipped ? outputs[1].token : 0, iteration.skipped, iteration.skipped ? shaper.said[1] : 0.0};
    once([&] {
        shaper.estimate = estimate;
        shaper.seen = seen;
        shaper.awaited = skipped;
    });
}

// decoder.py

TWIN int body_of(int width, bool masks) {
    int index = 0;
    ROLLED
    while (1 << index < width) ++index;
    return masks ? CLASSES + index - 1 : index;
}

// What runs next, in so many rows.
struct Next {
    int running, width;
};

// The anchor, unless a draft pass had it; then masks, or proposals.
TWIN Row row_of(const Loop& loop, int running, int i) {
    int known = running == VERIFY ? 0 : 1;
    int token = i < known ? loop.pending[0] : running == DRAFT ? -i : loop.proposals[i - known];
    return decisions::row_of(loop, i, decisions::causal_row(loop, i, token));
}

TWIN void plan(const Loop& loop, Shaper& shaper, Pass& pass, Next next) {
    int body = next.running == NOTHING ? NO_BODY : body_of(next.width, next.running == DRAFT && next.width > 1);
    once([&] {
        shaper.running = next.running;
        shaper.body = body;
        if (next.running == DRAFT) shaper.draft_width = next.width;
    });
    if (next.running == NOTHING) return;
    decisions::set_shape(loop, pass, next.width);
    each(next.width, [&](int i) { pass.rows[i] = row_of(loop, next.running, i); });
}

// After a draft pass: set proposals aside to verify, or commit the first as it is.
TWIN Iteration judge(Loop& loop, const Tuning& tuning, Shaper& shaper, const Moment& moment, const Chosen* outputs, Kept& kept,
                     Scratch& scratch) {
    int n = shaper.draft_width;
    int best = worth_verifying(tuning, moment, outputs, n, room(loop) - 1, shaper, scratch);
    once([&] {
        loop.passes += 1;
        shaper.first_entropy = outputs[0].entropy;
    });
    double spent = cost(tuning, moment, n);
    if (best > 1) {
        decisions::set_aside(loop, kept, outputs, best);
        return {};
    }
    once([&] {
        kept.tokens[0] = outputs[0].token;
        kept.sources[0] = decisions::SOURCE_EXACT;
    });
    decisions::commit(loop, kept, 1, 1, 0, 0, n > 1);
    return {DRAFT, 0, 0, n > 1, spent, n == 1};
}

// After a verify pass, of a draft's proposals or of copied ones.
TWIN Iteration accept(Loop& loop, const Tuning& tuning, const Shaper& shaper, const Moment& moment, const Chosen* outputs,
                      Kept& kept) {
    int n = loop.num_proposals, running = shaper.running;
    bool copied = running == COPY;
    int stood = decisions::accept(loop, outputs, kept, copied ? 0 : 1);
    if (copied) once([&] { loop.copied += 1; });
    double spent = cost(tuning, moment, copied ? n + 1 : shaper.draft_width);
    if (!copied) spent += cost(tuning, moment, n);
    return {running, n, stood, 0, spent, false};
}

TWIN void append(Past& past, const Kept& kept, int length) {
    each(kept.count, [&](int i) { past.text[length - kept.count + i] = kept.tokens[i]; });
}

// Sets aside what followed where the text last ended so; what repeats itself is taken to go on so.
TWIN void copy(Loop& loop, Shaper& shaper, int end, int count, const Scratch& scratch) {
    int period = loop.committed - end;
    each(count, [&](int i) {
        loop.proposals[i] = shaper.past.text[end + i % period];
        shaper.said[i] = scratch.chances[i];
    });
    once([&] { loop.num_proposals = count; });
}

// A copy, or the block that promises most.
TWIN Next choose(Loop& loop, const Tuning& tuning, Shaper& shaper, Scratch& scratch) {
    const Estimate& estimate = shaper.estimate;
    Moment moment = moment_of(tuning, estimate, loop.materialized);
    Match found = match(shaper.past, loop.committed, scratch);
    Plan plan = best_draft(tuning, odds(estimate), moment.price, loop.materialized, decisions::block(loop), scratch);
    if (!found.shared) return {DRAFT, plan.size};
    int rows = least(room(loop), MAX_WIDTH);
    int count = worth_copying(tuning, estimate, moment, found.shared, rows, plan.worth, scratch);
    if (!count) return {DRAFT, plan.size};
    copy(loop, shaper, found.end, count, scratch);
    return {COPY, count + 1};
}

// At an iteration's boundary: its first pass, if there is to be one.
TWIN Next advance(Loop& loop, const Tuning& tuning, Shaper& shaper, Control control, Scratch& scratch) {
    int status = decisions::status_of(loop, control, least(MAX_WIDTH, room(loop)));
    once([&] { loop.status = status; });
    return status == decisions::RUNNING ? choose(loop, tuning, shaper, scratch) : Next{NOTHING, 0};
}

// Takes what the pass that has run says (none at first), and plans the next one: shaper.body, or a loop that is not RUNNING.
TWIN void turn(Loop& loop, const Tuning& tuning, Shaper& shaper, Pass& pass, const Chosen* outputs, Kept& kept, Ring& ring,
               Control control, Scratch& scratch) {
    if (shaper.running != NOTHING) {
        Moment moment = moment_of(tuning, shaper.estimate, loop.committed - 1);
        Iteration iteration = shaper.running == DRAFT
                                  ? judge(loop, tuning, shaper, moment, outputs, kept, scratch)
                                  : accept(loop, tuning, shaper, moment, outputs, kept);
        if (loop.num_proposals) return plan(loop, shaper, pass, {VERIFY, loop.num_proposals});
        learn(tuning, shaper, moment, iteration, outputs, kept);
        append(shaper.past, kept, loop.committed);
        decisions::send(loop, kept, ring);
    }
    plan(loop, shaper, pass, advance(loop, tuning, shaper, control, scratch));
}

}  // namespace adaptive
