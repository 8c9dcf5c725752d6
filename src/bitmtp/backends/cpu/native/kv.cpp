#include "kv.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace bitmtp {

namespace {

constexpr std::size_t kHugePage = 2 << 20;

// A slot of one head: a column of K, a row of V.
struct Slot {
    const HeadLayout& head;
    std::uint8_t* piece;
    int index;

    std::uint8_t* key(int d) const {
        const std::size_t row = std::size_t(index / kBlockKeys) * head.head_dim + d;
        return piece + head.keys + element() * (row * kBlockKeys + index % kBlockKeys);
    }
    std::uint8_t* value() const { return piece + head.values + element() * head.padded_dim * index; }
    std::size_t element() const { return head.half ? 2 : 4; }
};

void copy_slot(const Slot& from, const Slot& to) {
    for (int d = 0; d < from.head.head_dim; ++d) std::memcpy(to.key(d), from.key(d), from.element());
    std::memcpy(to.value(), from.value(), from.element() * from.head.padded_dim);
}

// Copy the first `used` slots of one head, K by whole blocks.
void copy_head(const HeadLayout& head, const std::uint8_t* from, std::uint8_t* to, int used) {
    const std::size_t element = head.half ? 2 : 4;
    std::memcpy(to + head.keys, from + head.keys, element * round_up(used, kBlockKeys) * head.head_dim);
    std::memcpy(to + head.values, from + head.values, element * used * head.padded_dim);
}

}  // namespace

HeadLayout KvShape::head(int layer, int kv_head) const {
    const std::size_t base = head_bytes() * (std::size_t(layer) * kv_heads + kv_head);
    return {base, base + key_bytes(), head_dim, padded_dim(), half};
}

KvPiece::KvPiece(std::size_t bytes) : mapped_(bytes + kHugePage) {
    memory_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    const auto address = reinterpret_cast<std::uintptr_t>(memory_);
    data_ = static_cast<std::uint8_t*>(memory_) + (kHugePage - address % kHugePage) % kHugePage;
#ifdef MADV_HUGEPAGE
    madvise(data_, bytes, MADV_HUGEPAGE);  // a hint: a pass reads a few small pages of every layer
#endif
}

KvPiece::~KvPiece() { munmap(memory_, mapped_); }

void KvStore::reserve(int count) {
    const std::size_t end = (length_ + count + kPiecePositions - 1) / kPiecePositions;
    for (std::size_t index = length_ / kPiecePositions; index < std::min(end, pieces_.size()); ++index) {
        own(index, length_ - int(index) * kPiecePositions);
    }
    while (pieces_.size() < end) pieces_.push_back(std::make_shared<KvPiece>(shape_->piece_bytes()));
}

void KvStore::own(std::size_t index, int used) {
    std::shared_ptr<KvPiece>& piece = pieces_[index];
    if (piece.use_count() == 1) return;
    auto copy = std::make_shared<KvPiece>(shape_->piece_bytes());
    used = std::clamp(used, 0, kPiecePositions);
    for (int layer = 0; used > 0 && layer < shape_->layers; ++layer) {
        for (int head = 0; head < shape_->kv_heads; ++head) {
            copy_head(shape_->head(layer, head), piece->data(), copy->data(), used);
        }
    }
    piece = std::move(copy);
}

void KvStore::append(const std::vector<int>& indices, int written) {
    const int count = int(indices.size());
    bool in_order = true;
    for (int place = 0; place < count; ++place) in_order = in_order && indices[place] == place;
    if (!in_order) {
        for (int slot = length_; slot < length_ + count; slot = (slot / kPiecePositions + 1) * kPiecePositions) {
            own(slot / kPiecePositions, length_ + written - slot / kPiecePositions * kPiecePositions);
        }
        move(indices);
    }
    length_ += count;
}

void KvStore::move(const std::vector<int>& indices) {
    // By way of a spare, because a target may be another's source.
    std::vector<std::uint8_t> spare(shape_->head_bytes());
    const HeadLayout spare_head = shape_->head(0, 0);
    const auto at = [&](const HeadLayout& head, int slot) { return Slot{head, piece(slot), slot % kPiecePositions}; };
    const int count = int(indices.size());
    for (int layer = 0; layer < shape_->layers; ++layer) {
        for (int kv_head = 0; kv_head < shape_->kv_heads; ++kv_head) {
            const HeadLayout head = shape_->head(layer, kv_head);
            for (int i = 0; i < count; ++i) copy_slot(at(head, length_ + indices[i]), {spare_head, spare.data(), i});
            for (int i = 0; i < count; ++i) copy_slot({spare_head, spare.data(), i}, at(head, length_ + i));
        }
    }
}

void KvStore::truncate(int length) {
    length_ = length;
    pieces_.resize((length + kPiecePositions - 1) / kPiecePositions);
}

KvStore KvStore::fork(int length) const {
    KvStore copy(*shape_);
    copy.pieces_ = pieces_;
    copy.truncate(length);
    return copy;
}

}  // namespace bitmtp
