// What a pass costs here: milliseconds by width, known beforehand or learned from the passes that texts run anyway.
#pragma once

#include "lanes.hpp"

namespace core {

constexpr int MAX_ROWS = 64;  // of a pass, as far as costs are told apart
constexpr int KNOTS = 12;     // both sides of where a kernel's next width begins: 9 rows may cost what 16 cost
constexpr int TRUSTED = 2;    // passes of a width after which its cost is believed: the first may still grow buffers
constexpr double SLOWEST_RATE = 0.05, FARTHEST = 2.0;
// Passes behind short histories teach what a width costs, those behind long ones what a position adds; between the two a
// machine that slows down as a text grows would pass for a history that costs.
constexpr int NEAR = 2048, FAR = 4096, SETTLED = 8, FAR_WIDTH = 4;

// What passes behind long histories cost: averages, and how many there were.
struct Far {
    double milliseconds, history, width;
    int count, reserved;
};

struct alignas(16) Costs {
    double milliseconds[MAX_ROWS + 1];  // of passes of 0 … 64 rows behind `history` positions
    double per_pass, per_row;           // what a further position of history adds to a pass, and to each of its rows
    double row;                         // what a further row of a narrow pass costs
    double known[KNOTS];                // of a knot's width
    Far far[2];                         // of passes of one row, and of FAR_WIDTH and more
    int counts[KNOTS];                  // passes that taught it
    int history;
    int reach;     // widths up to this one have a cost to be believed
    int learning;  // 0: they stay as they are
    int rested;    // passes of known widths since another one was tried
    u64 stamp;     // of a card's clock, when the pass that runs was planned; 0: nothing was
};

CORE int knot(int i) {
    const signed char widths[KNOTS] = {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64};
    return widths[i];
}

// The first knot that is not below a width.
CORE int knot_of(int width) {
    int i = 0;
    ROLLED
    while (knot(i) < width) ++i;
    return i;
}

CALLED double cost(const Costs& costs, int width, int history) {
    return costs.milliseconds[least(width, MAX_ROWS)] + (history - costs.history) * (costs.per_pass + costs.per_row * width);
}

// Milliseconds of every width from the knots that are known: straight between them, in proportion to the rows beyond.
CALLED void spread(Costs& costs) {
    int left = -1;
    costs.reach = 0;
    ROLLED
    for (int i = 0; i < KNOTS; ++i) {
        if (costs.counts[i] < 1) continue;
        int from = left < 0 ? 0 : knot(left), to = knot(i);
        double low = left < 0 ? costs.known[i] : costs.known[left];
        ROLLED
        for (int w = from; w <= to; ++w) {
            double part = left < 0 ? 1.0 : double(w - from) / (to - from);
            costs.milliseconds[w] = low + (costs.known[i] - low) * part;
        }
        if (costs.counts[i] >= TRUSTED) costs.reach = to;
        left = i;
    }
    if (left < 0) return;
    ROLLED
    for (int w = knot(left) + 1; w <= MAX_ROWS; ++w) costs.milliseconds[w] = costs.known[left] * w / knot(left);
    costs.row = (costs.milliseconds[MAX_ROWS / 4] - costs.milliseconds[1]) / (MAX_ROWS / 4 - 1);
}

CALLED void learn_knot(Costs& costs, int i, double error, double part) {
    double rate = fmax(SLOWEST_RATE, 1.0 / (costs.counts[i] + 1));
    costs.known[i] += rate * part * error;
    if (part > 0.5) costs.counts[i] += 1;
}

CORE void follow(double& average, double value, double rate) { average += rate * (value - average); }

// What a position adds, from the two averages behind long histories and what the same widths cost behind short ones.
CALLED void learn_growth(Costs& costs) {
    double growth[2] = {0.0, 0.0};
    for (int i = 0; i < 2; ++i) {
        const Far& far = costs.far[i];
        if (far.count < SETTLED) continue;
        double near = costs.milliseconds[least(int(far.width + 0.5), MAX_ROWS)];
        growth[i] = fmax(far.milliseconds - near, 0.0) / (far.history - costs.history);
    }
    bool both = costs.far[1].count >= SETTLED;
    costs.per_row = both ? fmax(growth[1] - growth[0], 0.0) / (costs.far[1].width - 1) : 0.0;
    costs.per_pass = fmax(growth[0] - costs.per_row, 0.0);
}

CORE Far* far_of(Costs& costs, int width) {
    return width == 1 ? &costs.far[0] : width >= FAR_WIDTH ? &costs.far[1] : nullptr;
}

CALLED void learn_far(Costs& costs, int width, int history, double milliseconds) {
    Far* far = far_of(costs, width);
    if (!far) return;
    double rate = fmax(SLOWEST_RATE, 1.0 / (far->count + 1));
    follow(far->milliseconds, milliseconds, rate);
    follow(far->history, history, rate);
    follow(far->width, width, rate);
    far->count += 1;
    learn_growth(costs);
}

// How often a width was seen behind such a history.
CORE int times_seen(Costs& costs, int width, int history) {
    if (history <= NEAR) return costs.counts[knot_of(width)];
    Far* far = history < FAR ? nullptr : far_of(costs, width);
    return far ? least(far->count, costs.counts[knot_of(width)]) : costs.counts[knot_of(width)];
}

// A pass of so many rows behind this history took so long.
CALLED void learn_cost(Costs& costs, int width, int history, double milliseconds) {
    if (!costs.learning || width < 1 || width > MAX_ROWS) return;
    costs.rested = width <= most(costs.reach, 1) ? costs.rested + 1 : 0;
    int right = knot_of(width);
    if (history > NEAR && costs.counts[0] >= TRUSTED && costs.counts[right] >= TRUSTED) {
        if (history >= FAR) learn_far(costs, width, history, milliseconds);
        return;
    }
    double near = milliseconds - (history - costs.history) * (costs.per_pass + costs.per_row * width);
    if (costs.counts[right] == 0) {
        if (near > 0) costs.known[right] = near * knot(right) / width, costs.counts[right] = 1, spread(costs);
        return;
    }
    double expected = costs.milliseconds[width];
    if (costs.counts[right] > TRUSTED) near = fmin(fmax(near, expected / FARTHEST), expected * FARTHEST);
    double part = knot(right) == width ? 1.0 : double(width - knot(right - 1)) / (knot(right) - knot(right - 1));
    learn_knot(costs, right, near - expected, part);
    if (part < 1.0 && costs.counts[right - 1]) learn_knot(costs, right - 1, near - expected, 1.0 - part);
    spread(costs);
}

}  // namespace core
