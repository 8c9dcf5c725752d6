// The resident loop: whole iterations (draft, decide, verify, commit) without the host.
#pragma once

#include <vector>

#include "decisions.hpp"
#include "model.hpp"

namespace bitmtp {

/// What an iteration committed, the text behind it, and milliseconds within passes with masks and without.
struct Iteration {
    decisions::Kept kept;
    decisions::Loop loop;
    double draft_ms, exact_ms;
};

/// Go on with the text of a sequence; `request` holds its choice, `loop` how far it has come.
///
/// One iteration, and further ones as long as they promise to end within so many milliseconds; none if the text has ended.
/// Throws as Model does; what was committed until then is lost, and the sequence may be ahead of `loop`.
std::vector<Iteration> iterate(Model& model, int sequence, const decisions::Loop& loop, const Request& request,
                               double milliseconds);

}  // namespace bitmtp
