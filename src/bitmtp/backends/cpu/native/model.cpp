#include "model.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_set>

namespace bitmtp {

namespace {

void require(bool condition, const std::string& otherwise) {
    if (!condition) throw std::invalid_argument(otherwise);
}

}  // namespace

Model::Model(const Shape& shape, const Tensors& tensors, int threads)
    : context_(shape, tensors, threads), backbone_(context_), heads_(context_) {}

std::size_t Model::kv_bytes() {
    const std::lock_guard lock(mutex_);
    std::unordered_set<const KvPiece*> pieces;
    for (const auto& [handle, sequence] : sequences_) {
        for (const auto& piece : sequence.store.pieces()) pieces.insert(piece.get());
    }
    return pieces.size() * context_.kv.piece_bytes();
}

Sequence& Model::find(int sequence) {
    const auto at = sequences_.find(sequence);
    require(at != sequences_.end(), "sequence " + std::to_string(sequence) + " is not open");
    return at->second;
}

int Model::add(KvStore store) {
    sequences_.emplace(++last_, Sequence{std::move(store), {}});
    return last_;
}

int Model::open() {
    const std::lock_guard lock(mutex_);
    return add(KvStore(context_.kv));
}

void Model::close(int sequence) {
    const std::lock_guard lock(mutex_);
    find(sequence);
    sequences_.erase(sequence);
}

int Model::length(int sequence) {
    const std::lock_guard lock(mutex_);
    return find(sequence).store.length();
}

void Model::truncate(int sequence, int length) {
    const std::lock_guard lock(mutex_);
    Sequence& at = find(sequence);
    const int now = at.store.length();
    require(length >= 0 && length <= now,
            "cannot truncate " + std::to_string(now) + " positions to " + std::to_string(length));
    at.store.truncate(length);
    at.rows.clear();
}

int Model::fork(int sequence, int length) {
    const std::lock_guard lock(mutex_);
    const KvStore& store = find(sequence).store;
    const int now = store.length();
    require(length >= 0 && length <= now,
            "cannot fork " + std::to_string(length) + " of " + std::to_string(now) + " positions");
    return add(store.fork(length));
}

void Model::materialize(int sequence, const std::vector<int>& indices) {
    const std::lock_guard lock(mutex_);
    Sequence& at = find(sequence);
    check_continuation(at, indices);
    at.store.append(indices, int(at.rows.size()));
    at.rows.clear();
}

std::vector<Output> Model::step(const std::vector<Row>& rows, const Request& request, float* logits) {
    const std::lock_guard lock(mutex_);
    begin(rows, request);
    backbone_.run(pass_);
    std::vector<Output> outputs = heads_.run(pass_, backbone_, request);
    if (logits) copy_logits(logits);
    return outputs;
}

// Check everything before anything is written; a refused pass leaves no rows.
void Model::begin(const std::vector<Row>& rows, const Request& request) {
    forget_rows();
    require(!rows.empty() && rows.size() <= kMaxWidth, "a pass has 1 to 64 rows, not " + std::to_string(rows.size()));
    try {
        enter(rows, request);
        place();
    } catch (...) {
        forget_rows();
        throw;
    }
}

void Model::forget_rows() {
    for (auto& [handle, sequence] : sequences_) sequence.rows.clear();
}

void Model::enter(const std::vector<Row>& rows, const Request& request) {
    pass_.clear();
    for (const Row& row : rows) {
        Sequence& sequence = find(row.sequence);
        check(row, request);
        pass_.push_back({row, &sequence, sequence.store.length() + int(sequence.rows.size()), {}, {}});
        sequence.rows.push_back(row);
    }
    for (const PlacedRow& placed : pass_) {
        const int length = placed.sequence->store.length();
        check_visibility(placed.sequence->rows, placed.slot - length, length);
        if (context_.shape.medusa) check_anchor(placed.sequence->rows, placed.slot - length);
    }
}

void Model::check(const Row& row, const Request& request) const {
    const Shape& shape = context_.shape;
    const int context = int(context_.weights.cos.size()) / (shape.head_dim / 2);
    require(row.position >= 0 && row.position < context,
            "position " + std::to_string(row.position) + " is outside the context of " + std::to_string(context));
    require(row.token > -shape.block && row.token < shape.vocab,
            "token " + std::to_string(row.token) + " is neither in the vocabulary nor a mask of this model");
    require(row.choice < int(request.choices.size()), "a row names a choice that was not given");
    if (row.choice < 0) return;
    const Choice& choice = request.choices[row.choice];
    require(choice.seen.size() == choice.counts.size(), "a choice needs as many counts as tokens seen");
    require(choice.allowed.empty() || choice.allowed.size() * 32 >= std::size_t(shape.vocab),
            "the bit set of allowed tokens does not cover the vocabulary");
}

// Give every row its slot and find what it sees, or what it is made of.
void Model::place() {
    std::unordered_map<Sequence*, std::vector<int>> places;
    for (int index = 0; index < int(pass_.size()); ++index) places[pass_[index].sequence].push_back(index);
    for (auto& [sequence, own] : places) {
        sequence->store.reserve(int(own.size()));
        for (const int index : own) {
            if (context_.shape.medusa && pass_[index].row.token < 0) find_anchor(pass_[index], own);
            else find_visible(pass_[index], own);
        }
    }
}

void Model::copy_logits(float* to) const {
    int index = 0;
    for (const PlacedRow& placed : pass_) {
        if (placed.row.head != Head::none) std::copy_n(heads_.logits(index++), context_.shape.vocab, to);
        else std::fill_n(to, context_.shape.vocab, 0.0f);
        to += context_.shape.vocab;
    }
}

}  // namespace bitmtp
