// The layers of a pass: from embedded rows to the residual stream that the heads read.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "pass.hpp"
#include "pool.hpp"
#include "weights.hpp"

namespace bitmtp {

/// What every stage of a pass uses.
struct Context {
    Shape shape;
    KvShape kv;
    const Kernels& kernels;
    Weights weights;
    Pool pool;

    Context(const Shape& shape, const Tensors& tensors, int threads);

    /// Run body(row) for each row, on all threads where a region costs less than the rows.
    template <class F>
    void by_rows(int rows, F&& body) {
        pool.parallel(rows, rows <= 2 ? rows : 1, [&](int begin, int end, int) {
            for (int row = begin; row < end; ++row) body(row);
        });
    }

    /// Run body(begin, end) for the tiles of `matrix` on all threads; ranges begin at multiples of `multiple`.
    ///
    /// The tiles are cut into a lane for each thread, and pieces dealt from the lanes in turn: while threads are equally
    /// fast each reads one part of memory in order, and what it prefetches is its own.
    template <class F>
    void by_tiles(const PackedMatrix& matrix, int multiple, F&& body) {
        const int lanes = pool.threads(), tiles = matrix.tiles, size = piece_tiles(matrix, multiple);
        const int pieces = (tiles + size - 1) / size, each = pieces / lanes, longer = pieces % lanes;
        pool.parallel(pieces, 1, [&](int begin, int end, int) {
            for (int i = begin; i < end; ++i) {
                const int lane = i % lanes, first = (lane * each + std::min(lane, longer) + i / lanes) * size;
                body(first, std::min(first + size, tiles));
            }
        });
    }

    /// Tiles that a thread takes at a time: an eighth of its share, or as much of it as the kernels read in four streams.
    int piece_tiles(const PackedMatrix& matrix, int multiple) const {
        const int unit = std::lcm(matrix.dense ? dense::tiles : 4, multiple), units = (matrix.tiles + unit - 1) / unit;
        const int pieces = pool.threads() * std::clamp(units / (4 * pool.threads()), 2, 8);
        return (units + pieces - 1) / pieces * unit;
    }

    /// How many of equal tasks a thread takes at a time. Long streams read memory fastest, but threads are not equally
    /// fast.
    int chunk(int tasks) const {
        const int share = tasks / (2 * pool.threads());
        return share >= 4 ? share / 4 * 4 : std::max(1, share);
    }

    /// A vocabulary entry's row in float.
    void vocabulary_row(const Vocabulary& vocabulary, int id, float* out) const;

    /// A token's or mask's input vector.
    void embed(int token, float* out) const;
};

/// Memory for up to 64 quantised rows.
class QuantBuffer {
public:
    /// For inputs up to `in` wide, in up to `groups` groups, of scales and of steps.
    QuantBuffer(int in, int groups);

    /// As the input of `matrix`.
    QuantRows view(const PackedMatrix& matrix, int rows);

private:
    AlignedBuffer values_;
    Floats step_;
    std::vector<std::int32_t> sums_;
};

/// The layers and their scratch memory.
class Backbone {
public:
    explicit Backbone(Context& context);

    /// Run all layers; K/V of the rows are written behind their histories. Rows with an anchor are left out.
    void run(const std::vector<PlacedRow>& pass);

    /// The residual stream after the last layer of the row at a place in the pass that was not left out: [hidden].
    const float* hidden(int place) const { return x_.data() + x_.size() / kMaxWidth * row_at_[place]; }

private:
    void prepare(const float* x, const Floats& norm, const PackedMatrix& next, int row);
    void project(const Layer& layer, int index);
    void turn(float* head, const Floats& norm, int position, float scale);
    void finish_queries(const Layer& layer, int kv_head, int row);
    void finish_keys(const Layer& layer, const HeadLayout& layout, int kv_head, int row);

    /// A row that sees something of a piece.
    struct Seer {
        int row;
        int place;       ///< of the piece among those that it sees
        int begin, end;  ///< as in Query
    };

    /// What a block of up to eight rows of a sequence sees of a piece: spans, and the rows that see anything.
    struct Sight {
        int span, spans;
        int seer, rows;
    };

    /// Sights [sight … sight_end) of one block of rows, for one kv head.
    struct AttentionTask {
        int kv_head;
        int sight, sight_end;
    };
    void plan_attention();
    void add_sights(const std::vector<int>& rows);
    void add_sight(const std::vector<int>& rows, int piece);
    void add_attention_tasks(int begin, int end, bool split);
    void resize_partials(int count);
    void attend(int index);
    void attend_sight(const HeadLayout& layout, int kv_head, const Sight& sight, int thread);
    void collect(int row);
    Partial* partials(int row, int kv_head, int split);

    void feed_forward(const Layer& layer);
    void multiply_add(const PackedMatrix& matrix);

    float* row_of(Floats& buffer, int row) const { return buffer.data() + buffer.size() / kMaxWidth * row; }

    Context& context_;
    const Shape& shape_;
    const Kernels& kernels_;
    std::vector<const PlacedRow*> pass_;  ///< without the rows left out
    std::vector<int> row_at_;             ///< row of pass_ by place in the pass
    int width_ = 0;
    QuantBuffer quant_;
    // [64 rows][…]; a row of a product's result is as wide as its tiles
    Floats x_;
    Floats normed_;
    Floats qkv_;
    Floats attended_;
    Floats gate_up_;
    Floats inner_;
    Floats product_;
    std::vector<Sight> sights_;
    std::vector<Seer> seers_;
    std::vector<Span> spans_;
    std::vector<AttentionTask> tasks_;
    std::vector<std::vector<Query>> queries_;  ///< scratch of each thread
    Floats packed_queries_;                    ///< scratch of each thread
    // [row][kv head][split][head of the group], and spare ones for a task of each thread
    int splits_ = 1;
    std::vector<Partial> partials_;
    Floats partial_values_;
};

}  // namespace bitmtp
