#include "pass.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace bitmtp {

namespace {

// The rows of its sequence that a row sees, ascending.
std::vector<int> seen_by(const Row& row) {
    std::vector<int> indices(row.since);
    std::iota(indices.begin(), indices.end(), 0);
    for (std::uint64_t bits = row.visible; bits; bits &= bits - 1) indices.push_back(row.since + __builtin_ctzll(bits));
    return indices;
}

[[noreturn]] void reject(int index, const Row& row, const char* why) {
    throw std::invalid_argument("row " + std::to_string(index) + " of sequence " + std::to_string(row.sequence) + why);
}

bool extends(const Run& last, const Run& next) {
    return last.piece == next.piece && last.place + last.count == next.place && last.slot + last.count == next.slot;
}

// Add positions [begin, end) at slots from `slot` on, cut where an attention piece or a piece of the store ends.
void add_range(PlacedRow& placed, int begin, int end, int slot) {
    while (begin < end) {
        const int piece = begin / kPiecePositions, place = begin % kPiecePositions, inside = slot % kPiecePositions;
        const int count = std::min({end - begin, kPiecePositions - place, kPiecePositions - inside});
        const Run run = {placed.sequence->store.piece(slot), place, inside, count};
        begin += count;
        slot += count;
        if (placed.pieces.empty() || placed.pieces.back().piece != piece) {
            placed.pieces.push_back({piece, int(placed.runs.size()), 0});
        } else if (extends(placed.runs.back(), run)) {
            placed.runs.back().count += count;
            continue;
        }
        placed.runs.push_back(run);
        ++placed.pieces.back().count;
    }
}

void add_history(PlacedRow& placed) {
    const int length = placed.sequence->store.length();
    const Row& row = placed.row;
    if (!row.windowed) return add_range(placed, 0, length, 0);
    const int sinks = std::min(row.sinks, length);
    const int recent = std::clamp(row.position - row.recent + 1, sinks, std::max(sinks, length));
    add_range(placed, 0, sinks, 0);
    add_range(placed, recent, length, recent);
}

// The row with a token that a mask hangs from, if it sees one.
int anchor_of(const std::vector<Row>& rows, const Row& row) {
    for (const int index : seen_by(row)) {
        if (rows[index].token >= 0 && rows[index].position == row.position + row.token) return index;
    }
    return -1;
}

}  // namespace

void check_visibility(const std::vector<Row>& rows, int index, int length) {
    const Row& row = rows[index];
    const int count = int(rows.size());
    const std::vector<int> seen = row.since >= 0 && row.since < count ? seen_by(row) : std::vector<int>();
    if (seen.empty() || seen.back() >= count || !std::binary_search(seen.begin(), seen.end(), index)) {
        reject(index, row, ": its visibility bits are wrong");
    }
    std::vector<int> positions;
    for (const int other : seen) positions.push_back(rows[other].position);
    std::sort(positions.begin(), positions.end());
    const bool distinct = std::adjacent_find(positions.begin(), positions.end()) == positions.end();
    if (!distinct || positions.front() < length || positions.back() > row.position) {
        reject(index, row, " sees positions that it must not");
    }
}

void check_anchor(const std::vector<Row>& rows, int index) {
    const Row& row = rows[index];
    if (row.token < 0) {
        if (anchor_of(rows, row) < 0) reject(index, row, " is a mask that does not see its anchor");
        return;
    }
    for (const int other : seen_by(row)) {
        if (rows[other].token < 0) reject(index, row, " sees a mask, which has no keys");
    }
}

void check_continuation(const Sequence& sequence, const std::vector<int>& indices) {
    std::vector<int> seen;
    int position = sequence.store.length();
    for (const int index : indices) {
        if (index < 0 || index >= int(sequence.rows.size())) {
            throw std::invalid_argument("row " + std::to_string(index) + " was not in the last pass of its sequence");
        }
        const Row& row = sequence.rows[index];
        seen.insert(std::upper_bound(seen.begin(), seen.end(), index), index);
        if (row.token < 0 || row.windowed || seen_by(row) != seen || row.position != position++) {
            reject(index, row, " does not continue the history");
        }
    }
}

void find_visible(PlacedRow& placed, const std::vector<int>& places) {
    add_history(placed);
    const std::vector<Row>& rows = placed.sequence->rows;
    std::vector<int> seen = seen_by(placed.row);
    std::sort(seen.begin(), seen.end(), [&](int a, int b) { return rows[a].position < rows[b].position; });
    for (const int index : seen) {
        const int position = rows[index].position;
        add_range(placed, position, position + 1, placed.sequence->store.length() + index);
        if (position == placed.row.position - 1) placed.parent = places[index];
    }
}

void find_anchor(PlacedRow& placed, const std::vector<int>& places) {
    placed.anchor = places[anchor_of(placed.sequence->rows, placed.row)];
}

}  // namespace bitmtp
