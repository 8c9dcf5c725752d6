// The rows of a pass: checked, given their slots, and told which keys they see.
#pragma once

#include <cstdint>
#include <vector>

#include "kv.hpp"

namespace bitmtp {

constexpr int kMaxWidth = 64;

/// What is computed from a row's last hidden state. A draft head is the exact one until a cheaper one exists.
enum class Head : std::uint8_t { none = 0, draft = 1, exact = 2 };

/// One token position in a pass; see bitmtp.backends.base.Row.
struct Row {
    int sequence = 0;
    int token = 0;  ///< or -depth of a mask
    int position = 0;
    std::uint64_t visible = 0;  ///< bit i: sees row since + i of its sequence
    int since = 0;              ///< sees every row of its sequence before this one
    Head head = Head::exact;
    bool windowed = false;
    int sinks = 0;
    int recent = 0;
    int choice = -1;  ///< index of its Choice; -1: greedy
    int target = -1;  ///< whose logit is reported; -1: that of the token it chooses
};

/// A sequence: its K/V, and its rows of the last pass, which lie behind the history.
struct Sequence {
    KvStore store;
    std::vector<Row> rows;
};

/// The visible runs of one attention piece.
struct PieceRuns {
    int piece;  ///< position / 256
    int first;
    int count;
};

/// Where a row's K/V goes and what it attends to.
struct PlacedRow {
    Row row;
    Sequence* sequence;
    int slot;
    std::vector<Run> runs;  ///< ascending by position
    std::vector<PieceRuns> pieces;
    int parent = -1;  ///< the row of the pass at the position before, if it sees one
    int anchor = -1;  ///< of a Medusa head's row, which passes through no layer: the row of the pass it is made of
};

/// Throw std::invalid_argument unless row `index` of `rows` (all of one sequence) may see what its bits name.
void check_visibility(const std::vector<Row>& rows, int index, int length);

/// Throw std::invalid_argument if row `index` of `rows` sees a mask, or is one and does not see its anchor.
void check_anchor(const std::vector<Row>& rows, int index);

/// Throw std::invalid_argument unless these rows of the last pass, in this order, continue the history.
void check_continuation(const Sequence& sequence, const std::vector<int>& indices);

/// Fill in `runs`, `pieces` and `parent`. `places[i]` is the place in the pass of the sequence's i-th row.
void find_visible(PlacedRow& placed, const std::vector<int>& places);

/// Fill in `anchor`.
void find_anchor(PlacedRow& placed, const std::vector<int>& places);

}  // namespace bitmtp
