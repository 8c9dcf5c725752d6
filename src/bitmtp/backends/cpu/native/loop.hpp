// The loop: texts' plans, one pass, texts' outputs; many times over, without the host.
#pragma once

#include <array>
#include <vector>

#include "model.hpp"
#include "round.hpp"

namespace bitmtp {

/// The widths of a loop's passes, and milliseconds within those of prompts, of drafts, and without masks.
struct Ran {
    std::vector<int> widths;
    std::array<double, 3> milliseconds = {};
};

/// Run passes for texts for about so many milliseconds, and at least one if any has something to run. Returns sooner when a text
/// begins or ends, so that it is heard of at once. What texts commit are their events.
///
/// A text that a grammar guards takes part with the plan that the host has made, and its outputs wait for the host. `texts` keep
/// the order in which they are to be planned next. Throws as Model does; texts of the pass that
/// failed are as they were planned.
Ran run(Model& model, core::Batch& batch, std::vector<core::Owner*>& texts, int width, int prompt_rows,
                     double milliseconds);

}  // namespace bitmtp
