// A model on the CPU: its sequences and its pass.
#pragma once

#include <mutex>
#include <unordered_map>
#include <vector>

#include "backbone.hpp"
#include "heads.hpp"

namespace bitmtp {

/// Weights, sequences and scratch memory. Methods may be called from any thread; one runs at a time. All throw
/// std::invalid_argument for a handle, row or length that does not exist.
class Model {
public:
    Model(const Shape& shape, const Tensors& tensors, int threads);

    const char* isa() const { return context_.kernels.name; }
    int threads() const { return context_.pool.threads(); }
    std::size_t weight_bytes() const { return context_.weights.bytes(); }
    std::size_t kv_bytes();  ///< what forks share counts once

    int open();
    void close(int sequence);
    int length(int sequence);
    void truncate(int sequence, int length);
    int fork(int sequence, int length);

    /// Append rows of the last pass, numbered within the sequence, to the history in this order.
    void materialize(int sequence, const std::vector<int>& indices);

    /// One pass over 1 … 64 rows. `logits`, if not null, receives [rows][vocab] raw logits (zeros without a head).
    std::vector<Output> step(const std::vector<Row>& rows, const Request& request, float* logits);

private:
    Sequence& find(int sequence);
    int add(KvStore store);
    void begin(const std::vector<Row>& rows, const Request& request);
    void enter(const std::vector<Row>& rows, const Request& request);
    void forget_rows();
    void check(const Row& row, const Request& request) const;
    void place();
    void copy_logits(float* to) const;

    std::mutex mutex_;
    Context context_;
    Backbone backbone_;
    OutputHeads heads_;
    std::unordered_map<int, Sequence> sequences_;
    int last_ = 0;
    std::vector<PlacedRow> pass_;
};

}  // namespace bitmtp
