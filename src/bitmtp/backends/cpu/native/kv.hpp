// The K/V of sequences: pieces of 256 slots, shared between forks until one of them writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.hpp"

namespace bitmtp {

/// Sizes that are the same for every piece of a model.
struct KvShape {
    int layers;
    int kv_heads;
    int head_dim;
    bool half;  ///< float16, else float32

    int padded_dim() const { return round_up(head_dim, kBlockKeys); }
    std::size_t element() const { return half ? 2 : 4; }
    std::size_t key_bytes() const { return element() * kPiecePositions * head_dim; }
    std::size_t value_bytes() const { return element() * kPiecePositions * padded_dim(); }
    std::size_t head_bytes() const { return (key_bytes() + value_bytes() + 63) / 64 * 64; }
    std::size_t piece_bytes() const { return head_bytes() * layers * kv_heads; }
    HeadLayout head(int layer, int kv_head) const;
};

/// Zeroed memory for 256 slots of every layer and head; pages that are never written cost nothing.
class KvPiece {
public:
    /// Throws std::bad_alloc.
    explicit KvPiece(std::size_t bytes);
    ~KvPiece();
    KvPiece(const KvPiece&) = delete;
    KvPiece& operator=(const KvPiece&) = delete;

    std::uint8_t* data() const { return data_; }

private:
    std::size_t mapped_;  ///< bytes
    void* memory_;
    std::uint8_t* data_;  ///< in it, at a huge page's boundary
};

/// One sequence's K/V: `length()` slots of history, slot = position, and behind it whatever the last pass wrote.
class KvStore {
public:
    explicit KvStore(const KvShape& shape) : shape_(&shape) {}

    int length() const { return length_; }
    const std::vector<std::shared_ptr<KvPiece>>& pieces() const { return pieces_; }

    /// The piece of `slot`, to read.
    std::uint8_t* piece(int slot) const { return pieces_[slot / kPiecePositions]->data(); }

    /// Make `count` slots behind the history writable: allocate, and copy pieces that a fork shares.
    void reserve(int count);

    /// Append the slots length() + indices[i] to the history in this order; `written` slots behind it hold data.
    void append(const std::vector<int>& indices, int written);

    /// Keep the first `length` slots.
    void truncate(int length);

    /// A store that shares the first `length` slots.
    KvStore fork(int length) const;

private:
    void own(std::size_t piece, int used);
    void move(const std::vector<int>& indices);

    const KvShape* shape_;
    std::vector<std::shared_ptr<KvPiece>> pieces_;
    int length_ = 0;
};

}  // namespace bitmtp
