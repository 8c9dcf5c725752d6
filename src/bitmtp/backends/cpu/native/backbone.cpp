#include "backbone.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <unordered_map>
#include <utility>

namespace bitmtp {

namespace {

constexpr int kMostBlockRows = 8;
constexpr int kFewHeads = 24;  // whose norms and rotations cost less than a region

int most_groups(const Weights& weights) {
    int groups = std::max(weights.embedding.packed.groups, weights.head.packed.groups);
    for (const Layer& layer : weights.layers) {
        for (const PackedMatrix& part : layer.qkv) groups = std::max(groups, part.groups);
        for (const PackedMatrix* matrix : {&layer.o, &layer.gate_up, &layer.down}) groups = std::max(groups, matrix->groups);
    }
    return groups;
}

int tiles_of(const std::vector<PackedMatrix>& parts) {
    return std::accumulate(parts.begin(), parts.end(), 0, [](int sum, const PackedMatrix& part) { return sum + part.tiles; });
}

// Where a row keeps a piece's runs; -1 if it sees nothing of it.
int place_of(const PlacedRow& placed, int piece) {
    const auto at = std::lower_bound(placed.pieces.begin(), placed.pieces.end(), piece,
                                     [](const PieceRuns& runs, int number) { return runs.piece < number; });
    return at != placed.pieces.end() && at->piece == piece ? int(at - placed.pieces.begin()) : -1;
}

// A run that one row sees.
struct SeenRun {
    Run run;
    std::uint32_t row;  // its bit
};

bool before(const Run& a, const Run& b) {
    return std::less<>()(a.piece, b.piece) || (a.piece == b.piece && a.slot < b.slot);
}

// The runs cut where what some row sees begins or ends; appended to `spans`, ascending by position.
void cut_runs(const std::vector<SeenRun>& runs, std::uint32_t all, std::vector<Span>& spans) {
    std::vector<Run> edges;
    for (const auto& [run, row] : runs) {
        edges.push_back({run.piece, run.place, run.slot, 0});
        edges.push_back({run.piece, run.place + run.count, run.slot + run.count, 0});
    }
    std::sort(edges.begin(), edges.end(), before);
    edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
    const auto first = std::ptrdiff_t(spans.size());
    for (std::size_t i = 0; i + 1 < edges.size(); ++i) {
        Run cut = edges[i];
        cut.count = edges[i + 1].slot - cut.slot;
        std::uint32_t seen = 0;
        for (const auto& [run, row] : runs) {
            if (run.piece == cut.piece && run.slot <= cut.slot && cut.slot < run.slot + run.count) {
                cut.place = run.place + cut.slot - run.slot;
                seen |= row;
            }
        }
        if (seen) spans.push_back({cut, seen == all ? kAllRows : seen});
    }
    std::stable_sort(spans.begin() + first, spans.end(),
                     [](const Span& a, const Span& b) { return a.run.place < b.run.place; });
}

int widest_input(const Shape& shape) { return std::max({shape.hidden, shape.attention(), shape.inner}); }

}  // namespace

Context::Context(const Shape& s, const Tensors& tensors, int threads)
    : shape(s),
      kv{s.layers, s.kv_heads, s.head_dim, s.half_kv},
      kernels(select_kernels()),
      weights(s, tensors, kernels.dense),
      pool(threads) {}

void Context::vocabulary_row(const Vocabulary& vocabulary, int id, float* out) const {
    if (vocabulary.is_half()) kernels.expand_half(vocabulary.half_row(id, shape.hidden), out, shape.hidden);
    else unpack_row(vocabulary.packed, id, out);
}

void Context::embed(int token, float* out) const {
    if (token >= 0) return vocabulary_row(weights.embedding, token, out);
    const float* row = weights.masks.data() + std::size_t(-token - 1) * shape.hidden;
    std::copy(row, row + shape.hidden, out);
}

QuantBuffer::QuantBuffer(int in, int groups)
    : values_(std::size_t(kMaxWidth) * padded_inputs(in)), step_(kMaxWidth * groups), sums_(kMaxWidth * groups) {}

QuantRows QuantBuffer::view(const PackedMatrix& matrix, int rows) {
    return {rows, padded_inputs(matrix.in), reinterpret_cast<std::int8_t*>(values_.data()), step_.data(), sums_.data()};
}

Backbone::Backbone(Context& context)
    : context_(context),
      shape_(context.shape),
      kernels_(context.kernels),
      quant_(widest_input(shape_), most_groups(context.weights)),
      x_(kMaxWidth * shape_.hidden),
      normed_(kMaxWidth * widest_input(shape_)),
      qkv_(kMaxWidth * tiles_of(context.weights.layers[0].qkv) * tile_rows),
      attended_(kMaxWidth * shape_.attention()),
      gate_up_(kMaxWidth * context.weights.layers[0].gate_up.tiles * tile_rows),
      inner_(gate_up_.size() / 2),
      product_(kMaxWidth * context.weights.layers[0].o.out),
      queries_(context.pool.threads()),
      packed_queries_(context.pool.threads() * kMostQueries * round_up(shape_.head_dim, kQueryChunk)) {}

void Backbone::run(const std::vector<PlacedRow>& pass) {
    pass_.clear();
    row_at_.clear();
    for (const PlacedRow& placed : pass) {
        row_at_.push_back(int(pass_.size()));
        if (placed.anchor < 0) pass_.push_back(&placed);
    }
    width_ = int(pass_.size());
    plan_attention();
    context_.by_rows(width_, [&](int row) { context_.embed(pass_[row]->row.token, row_of(x_, row)); });
    for (int index = 0; index < shape_.layers; ++index) {
        const Layer& layer = context_.weights.layers[index];
        project(layer, index);
        attend(index);
        context_.by_rows(width_, [&](int row) {
            collect(row);
            prepare(row_of(attended_, row), layer.attention_sub_norm, layer.o, row);
        });
        multiply_add(layer.o);
        feed_forward(layer);
    }
}

// One row through a norm, if there is one, to the quantised input of the next product.
void Backbone::prepare(const float* x, const Floats& norm, const PackedMatrix& next, int row) {
    float* normed = row_of(normed_, row);
    if (!norm.empty()) kernels_.norm(x, norm.data(), next.in, shape_.eps, normed);
    kernels_.quantise(norm.empty() ? x : normed, next, quant_.view(next, width_), row);
}

void Backbone::project(const Layer& layer, int index) {
    float* result = qkv_.data();
    for (const PackedMatrix& part : layer.qkv) {
        context_.by_rows(width_, [&](int row) { prepare(row_of(x_, row), layer.attention_norm, part, row); });
        const QuantRows input = quant_.view(part, width_);
        context_.by_tiles(part, 1, [&](int begin, int end) {
            kernels_.product(part, input, begin, end, result, qkv_.size() / kMaxWidth);
        });
        result += part.tiles * tile_rows;
    }
    // By heads: neighbouring rows' keys share cache lines, which two threads would take from each other. Queries apart
    // from keys and values, because few heads do not divide evenly among the threads.
    const int parts = 2 * shape_.kv_heads, heads = width_ * (shape_.heads + shape_.kv_heads);
    context_.pool.parallel(parts, heads < kFewHeads ? parts : 1, [&](int begin, int end, int) {
        for (int part = begin; part < end; ++part) {
            const int kv_head = part / 2;
            for (int row = 0; row < width_; ++row) {
                if (part % 2) finish_queries(layer, kv_head, row);
                else finish_keys(layer, context_.kv.head(index, kv_head), kv_head, row);
            }
        }
    });
}

// Norm, if there is one, and rotation of one head.
void Backbone::turn(float* head, const Floats& norm, int position, float scale) {
    const int n = shape_.head_dim;
    const std::size_t angles = std::size_t(position) * (n / 2);
    if (!norm.empty()) kernels_.norm(head, norm.data(), n, shape_.eps, head);
    kernels_.rope(head, context_.weights.cos.data() + angles, context_.weights.sin.data() + angles, n, scale);
}

// Bias, norm, rotation and scale of a row's queries of one kv head.
void Backbone::finish_queries(const Layer& layer, int kv_head, int row) {
    const int n = shape_.head_dim, group = shape_.group(), position = pass_[row]->row.position;
    float* q = row_of(qkv_, row) + kv_head * group * n;
    if (!layer.q_bias.empty()) kernels_.add(q, layer.q_bias.data() + kv_head * group * n, group * n);
    for (int head = 0; head < group; ++head) turn(q + head * n, layer.q_norm, position, 1.0f / std::sqrt(float(n)));
}

// Bias, norm and rotation of a row's key and value of one kv head, which go to the store.
void Backbone::finish_keys(const Layer& layer, const HeadLayout& layout, int kv_head, int row) {
    const PlacedRow& placed = *pass_[row];
    const int n = shape_.head_dim, slot = placed.slot % kPiecePositions;
    float* k = row_of(qkv_, row) + round_up(shape_.attention(), tile_rows) + kv_head * n;
    float* v = k + round_up(shape_.kv(), tile_rows);
    if (!layer.k_bias.empty()) {
        kernels_.add(k, layer.k_bias.data() + kv_head * n, n);
        kernels_.add(v, layer.v_bias.data() + kv_head * n, n);
    }
    turn(k, layer.k_norm, placed.row.position, 1.0f);
    std::uint8_t* piece = placed.sequence->store.piece(placed.slot);
    kernels_.store_key(piece, layout, slot, k);
    kernels_.store_value(piece, layout, slot, v);
}

// A task takes up to eight rows of a sequence, which read each piece of K/V together while it is in the cache. Where
// that leaves too few tasks, blocks are smaller and each piece is a task, merged afterwards.
void Backbone::plan_attention() {
    std::unordered_map<const Sequence*, std::vector<int>> by_sequence;
    int most = 1;
    for (int row = 0; row < width_; ++row) {
        const PlacedRow& placed = *pass_[row];
        by_sequence[placed.sequence].push_back(row);
        most = std::max(most, int(placed.pieces.size()));
    }
    const int threads = context_.pool.threads(), kv_heads = shape_.kv_heads, wanted = 4 * threads;
    int size = kMostBlockRows, blocks = 0;
    for (const auto& [sequence, rows] : by_sequence) blocks += (int(rows.size()) + size - 1) / size;
    const bool split = blocks * kv_heads < wanted;
    if (split) size = std::clamp(width_ * kv_heads * most / wanted, 1, kMostBlockRows);
    splits_ = split ? most : 1;

    sights_.clear();
    seers_.clear();
    spans_.clear();
    tasks_.clear();
    for (const auto& [sequence, rows] : by_sequence) {
        const int count = int(rows.size()), parts = (count + size - 1) / size;
        for (int i = 0; i < parts; ++i) {
            const int begin = int(sights_.size());
            add_sights({rows.begin() + count * i / parts, rows.begin() + count * (i + 1) / parts});
            add_attention_tasks(begin, int(sights_.size()), split);
        }
    }
    resize_partials((width_ * kv_heads * splits_ + threads * kMostBlockRows) * shape_.group());
}

// What a block of rows sees, piece by piece.
void Backbone::add_sights(const std::vector<int>& rows) {
    std::vector<int> pieces;
    for (const int row : rows) {
        for (const PieceRuns& runs : pass_[row]->pieces) pieces.push_back(runs.piece);
    }
    std::sort(pieces.begin(), pieces.end());
    pieces.erase(std::unique(pieces.begin(), pieces.end()), pieces.end());
    for (const int piece : pieces) add_sight(rows, piece);
}

void Backbone::add_sight(const std::vector<int>& rows, int piece) {
    Sight sight = {int(spans_.size()), 0, int(seers_.size()), 0};
    std::vector<SeenRun> seen;
    std::uint32_t all = 0;
    for (const int row : rows) {
        const PlacedRow& placed = *pass_[row];
        const int place = place_of(placed, piece);
        if (place < 0) continue;
        const std::uint32_t bit = std::uint32_t(1) << sight.rows;
        const Run* runs = placed.runs.data() + placed.pieces[place].first;
        const Run& last = runs[placed.pieces[place].count - 1];
        for (const Run* run = runs; run <= &last; ++run) seen.push_back({*run, bit});
        seers_.push_back({row, place, runs->place / kBlockKeys * kBlockKeys,
                          round_up(last.place + last.count, kBlockKeys)});
        ++sight.rows;
        all |= bit;
    }
    cut_runs(seen, all, spans_);
    sight.spans = int(spans_.size()) - sight.span;
    sights_.push_back(sight);
}

void Backbone::add_attention_tasks(int begin, int end, bool split) {
    for (int kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) {
        if (!split) tasks_.push_back({kv_head, begin, end});
        for (int at = begin; split && at < end; ++at) tasks_.push_back({kv_head, at, at + 1});
    }
}

void Backbone::resize_partials(int count) {
    const int size = context_.kv.padded_dim();
    partials_.resize(count);
    partial_values_.resize(std::size_t(count) * size);
    for (int i = 0; i < count; ++i) partials_[i].o = partial_values_.data() + std::size_t(i) * size;
}

Partial* Backbone::partials(int row, int kv_head, int split) {
    return partials_.data() + std::size_t((row * shape_.kv_heads + kv_head) * splits_ + split) * shape_.group();
}

void Backbone::attend(int index) {
    context_.pool.parallel(int(tasks_.size()), 1, [&](int begin, int end, int thread) {
        for (int i = begin; i < end; ++i) {
            const AttentionTask& task = tasks_[i];
            const HeadLayout layout = context_.kv.head(index, task.kv_head);
            for (int at = task.sight; at < task.sight_end; ++at) {
                attend_sight(layout, task.kv_head, sights_[at], thread);
            }
        }
    });
}

void Backbone::attend_sight(const HeadLayout& layout, int kv_head, const Sight& sight, int thread) {
    const int group = shape_.group();
    Partial* spare = partials(width_, 0, 0) + thread * kMostBlockRows * group;
    Partial* into[kMostBlockRows] = {};  // the pieces before this one, unless they are merged later or there are none
    std::vector<Query>& queries = queries_[thread];
    queries.clear();
    for (int i = 0; i < sight.rows; ++i) {
        const Seer& seer = seers_[sight.seer + i];
        Partial* out = partials(seer.row, kv_head, splits_ > 1 ? seer.place : 0);
        if (splits_ == 1 && seer.place > 0) into[i] = std::exchange(out, spare + i * group);
        const float* q = row_of(qkv_, seer.row) + kv_head * group * shape_.head_dim;
        for (int head = 0; head < group; ++head) {
            queries.push_back({q + head * shape_.head_dim, out + head, i, seer.begin, seer.end});
        }
    }
    float* packed = packed_queries_.data() + packed_queries_.size() / context_.pool.threads() * thread;
    kernels_.attend(layout, &spans_[sight.span], sight.spans, queries.data(), int(queries.size()), packed);
    for (int i = 0; i < sight.rows; ++i) {
        for (int head = 0; into[i] && head < group; ++head) {
            kernels_.merge(into[i][head], spare[i * group + head], layout.padded_dim);
        }
    }
}

// The remaining merges of a row, and its division.
void Backbone::collect(int row) {
    const int group = shape_.group(), splits = std::min(splits_, int(pass_[row]->pieces.size()));
    for (int head = 0; head < shape_.heads; ++head) {
        Partial& whole = partials(row, head / group, 0)[head % group];
        for (int split = 1; split < splits; ++split) {
            kernels_.merge(whole, partials(row, head / group, split)[head % group], context_.kv.padded_dim());
        }
        kernels_.divide(whole, shape_.head_dim, row_of(attended_, row) + head * shape_.head_dim);
    }
}

// x += product, tile by tile.
void Backbone::multiply_add(const PackedMatrix& matrix) {
    const QuantRows input = quant_.view(matrix, width_);
    context_.by_tiles(matrix, 1, [&](int begin, int end) {
        kernels_.product(matrix, input, begin, end, product_.data(), product_.size() / kMaxWidth);
        const int first = begin * tile_rows, count = std::min(end * tile_rows, shape_.hidden) - first;
        for (int row = 0; row < width_; ++row) {
            kernels_.add(row_of(x_, row) + first, row_of(product_, row) + first, count);
        }
    });
}

void Backbone::feed_forward(const Layer& layer) {
    context_.by_rows(width_, [&](int row) { prepare(row_of(x_, row), layer.mlp_norm, layer.gate_up, row); });
    const QuantRows input = quant_.view(layer.gate_up, width_);
    context_.by_tiles(layer.gate_up, 2, [&](int begin, int end) {
        kernels_.product(layer.gate_up, input, begin, end, gate_up_.data(), gate_up_.size() / kMaxWidth);
        for (int row = 0; row < width_; ++row) {
            const float* gate_up = row_of(gate_up_, row) + tile_rows * begin;
            kernels_.activate(gate_up, row_of(inner_, row) + tile_rows * begin / 2, (end - begin) / 2, shape_.relu2);
        }
    });
    context_.by_rows(width_, [&](int row) { prepare(row_of(inner_, row), layer.mlp_sub_norm, layer.down, row); });
    multiply_add(layer.down);
}

}  // namespace bitmtp
