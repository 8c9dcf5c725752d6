#include "heads.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace bitmtp {

namespace {

constexpr int kBlock = 768;     // entries of a task of the head product: whole units of any packing
constexpr int kChainRows = 16;  // of the chain's inner layer in a task: they stay in the first cache
constexpr int kGuessRows = 16;  // of the Medusa heads in a task, for the same reason
const Choice kGreedy;

const Choice& choice_of(const Row& row, const Request& request) {
    return row.choice < 0 ? kGreedy : request.choices[row.choice];
}

}  // namespace

OutputHeads::OutputHeads(Context& context)
    : context_(context),
      kernels_(context.kernels),
      vocabulary_(context.weights.output()),
      stride_(round_up(context.shape.vocab, dense::tiles * tile_rows)),
      blocks_((stride_ + kBlock - 1) / kBlock),
      sum_blocks_((stride_ + kSumBlock - 1) / kSumBlock),
      logits_memory_(sizeof(float) * kMaxWidth * stride_),
      logits_(reinterpret_cast<float*>(logits_memory_.data())),
      quant_(context.shape.hidden, std::max(1, vocabulary_.packed.groups)),
      normed_(kMaxWidth * context.shape.hidden),
      block_max_(kMaxWidth * blocks_),
      sums_(kMaxWidth * sum_blocks_),
      moments_(kMaxWidth * sum_blocks_),
      statistics_(kMaxWidth),
      ids_(std::max(stride_, kCandidates)),
      choosers_(context.pool.threads(), Chooser(context.kernels, std::max(stride_, kCandidates))) {
    std::iota(ids_.begin(), ids_.end(), 0);
    const int hidden = context.shape.hidden, rank = context.shape.chain_rank;
    if (context.shape.medusa) guessed_.resize(kMaxWidth * hidden);
    if (rank == 0) return;
    best_.resize(kMaxWidth);
    own_.resize(kMaxWidth * rank);
    candidates_.resize(std::size_t(kMaxWidth) * kCandidates * hidden);
    ones_.assign(hidden, 1.0f);
    given_.resize(hidden);
    inner_.resize(rank);
    shift_.resize(hidden);
}

std::vector<Output> OutputHeads::run(const std::vector<PlacedRow>& pass, const Backbone& backbone,
                                     const Request& request) {
    pass_ = &pass;
    outputs_.assign(pass.size(), {});
    rows_.clear();
    guesses_.clear();
    for (int row = 0; row < int(pass.size()); ++row) {
        if (pass[row].row.head == Head::none) continue;
        if (pass[row].anchor >= 0) guesses_.push_back(int(rows_.size()));
        rows_.push_back(row);
    }
    const int count = int(rows_.size());
    Pool& pool = context_.pool;
    context_.by_rows(count, [&](int index) { prepare(backbone, index); });
    if (!guesses_.empty()) guess();
    pool.parallel(count ? blocks_ : 0, 1, [&](int begin, int end, int) {
        for (int block = begin; block < end; ++block) multiply_block(block);
    });
    for (int index = 0; index < count; ++index) {
        const auto maxima = block_max_.begin() + index * blocks_;
        statistics_[index].max = *std::max_element(maxima, maxima + blocks_);
    }
    pool.parallel(count * sum_blocks_, context_.chunk(count * sum_blocks_), [&](int begin, int end, int) {
        for (int task = begin; task < end; ++task) sum_block(task / sum_blocks_, task % sum_blocks_);
    });
    pool.parallel(count, 1, [&](int begin, int end, int thread) {
        for (int index = begin; index < end; ++index) {
            summarise(index);
            if (chained(index)) find_candidates(index, request, choosers_[thread]);
            else choose(index, request, choosers_[thread]);
        }
    });
    run_chain(request);
    for (int index = 0; index < count; ++index) {
        const int target = placed(index).row.target;
        output(index).raw = raw(index)[target < 0 ? output(index).token : target];
        output(index).total = double(statistics_[index].max) + std::log(double(statistics_[index].z));
    }
    return std::move(outputs_);
}

// Candidates of a chained row, and their rows of the head.
void OutputHeads::find_candidates(int index, const Request& request, Chooser& chooser) {
    const int hidden = context_.shape.hidden;
    best_[index] = best(index, std::max(kCandidates, request.top), chooser);
    const int count = std::min(kCandidates, int(best_[index].size()));
    for (int i = 0; i < count; ++i) {
        context_.vocabulary_row(vocabulary_, best_[index][i], candidates(index) + std::size_t(i) * hidden);
    }
}

// The largest logits of a row, as Chooser::best. The count-th largest of the blocks' maxima is no larger than the count-th
// largest logit, so only blocks that reach it are read again.
std::vector<int> OutputHeads::best(int index, int count, Chooser& chooser) {
    if (count <= 0 || count > blocks_) return chooser.best(entries(index), count);
    const float* maxima = block_max_.data() + index * blocks_;
    std::vector<float> sorted(maxima, maxima + blocks_);
    std::nth_element(sorted.begin(), sorted.begin() + count - 1, sorted.end(), std::greater<>());
    const float threshold = sorted[count - 1];
    std::vector<int> found;
    std::int32_t places[kBlock];
    for (int block = 0; block < blocks_; ++block) {
        if (maxima[block] < threshold) continue;
        const int begin = block * kBlock, size = std::min(kBlock, stride_ - begin);
        const int more = kernels_.collect(raw(index) + begin, size, threshold, places);
        for (int i = 0; i < more; ++i) found.push_back(begin + places[i]);
    }
    const float* logits = raw(index);
    std::partial_sort(found.begin(), found.begin() + count, found.end(), [&](int a, int b) {
        return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    });
    found.resize(count);
    return found;
}

// The rows' own part of the chain's inner layer, all rows together, so that its weights are read once.
void OutputHeads::prepare_chain(const std::vector<int>& indices) {
    const int hidden = context_.shape.hidden, rank = context_.shape.chain_rank;
    context_.pool.parallel(indices.empty() ? 0 : rank, kChainRows, [&](int begin, int end, int) {
        const float* a = context_.weights.chain_hidden.data() + std::size_t(begin) * 2 * hidden;
        for (const int index : indices) {
            kernels_.dots(a, 2 * hidden, end - begin, normed(index), hidden, own(index) + begin);
        }
    });
}

// Chained rows one by one: each needs the token of the row before it.
void OutputHeads::run_chain(const Request& request) {
    std::vector<int> order;
    for (int index = 0; index < int(rows_.size()); ++index) {
        if (chained(index)) order.push_back(index);
    }
    prepare_chain(order);
    const auto position = [&](int index) { return placed(index).row.position; };
    std::sort(order.begin(), order.end(), [&](int a, int b) { return position(a) < position(b); });
    for (const int index : order) choose_chained(index, request);
}

bool OutputHeads::chained(int index) const {
    const PlacedRow& row = placed(index);
    return context_.shape.chain_rank > 0 && row.row.token < 0 && row.parent >= 0 &&
           (*pass_)[row.parent].row.head != Head::none;
}

// The row's last hidden state through the norm; of a Medusa head's row its anchor's, which guess() goes on with.
void OutputHeads::prepare(const Backbone& backbone, int index) {
    const int anchor = placed(index).anchor;
    const float* hidden = backbone.hidden(anchor < 0 ? rows_[index] : anchor);
    kernels_.norm(hidden, context_.weights.norm.data(), context_.shape.hidden, context_.shape.eps, normed(index));
    if (anchor < 0) quantise(index);
}

// Rows of Medusa heads, from their anchors' normed rows: all rows together, so that a head's weights are read once.
void OutputHeads::guess() {
    const int hidden = context_.shape.hidden;
    const auto head = [&](int index) -> const MedusaHead& { return context_.weights.medusa[-placed(index).row.token - 1]; };
    context_.pool.parallel(hidden, kGuessRows, [&](int begin, int end, int) {
        for (const int index : guesses_) {
            const auto* weight = reinterpret_cast<const std::uint16_t*>(head(index).weight.data());
            for (int i = begin; i < end; ++i) {
                guessed(index)[i] = kernels_.dot_half(weight + std::size_t(i) * hidden, normed(index), hidden);
            }
        }
    });
    for (const int index : guesses_) {
        kernels_.add(guessed(index), head(index).bias.data(), hidden);
        kernels_.silu(guessed(index), hidden);
        kernels_.add(normed(index), guessed(index), hidden);
        quantise(index);
    }
}

void OutputHeads::quantise(int index) {
    const PackedMatrix& matrix = vocabulary_.packed;
    if (vocabulary_.is_half()) return;
    kernels_.quantise(normed(index), matrix, quant_.view(matrix, int(rows_.size())), index);
}

// Logits of a block of entries for all rows, and their maxima.
void OutputHeads::multiply_block(int block) {
    const int begin = block * kBlock, end = std::min(begin + kBlock, stride_), vocab = context_.shape.vocab;
    const int count = int(rows_.size());
    if (vocabulary_.is_half()) {
        multiply_half(begin, std::min(end, vocab));
    } else {
        const QuantRows input = quant_.view(vocabulary_.packed, count);
        const int tile_end = std::min(end / tile_rows, vocabulary_.packed.tiles);
        kernels_.product(vocabulary_.packed, input, begin / tile_rows, tile_end, logits_, stride_);
    }
    for (int index = 0; index < count; ++index) {
        for (int id = vocab; id < end; ++id) raw(index)[id] = kNever;
        block_max_[index * blocks_ + block] = kernels_.maximum(raw(index) + begin, end - begin);
    }
}

void OutputHeads::multiply_half(int begin, int end) {
    const int hidden = context_.shape.hidden;
    for (int id = begin; id < end; ++id) {
        const std::uint16_t* weights = vocabulary_.half_row(id, hidden);
        for (int index = 0; index < int(rows_.size()); ++index) {
            raw(index)[id] = kernels_.dot_half(weights, normed(index), hidden);
        }
    }
}

void OutputHeads::sum_block(int index, int block) {
    const int begin = block * kSumBlock, count = std::min(kSumBlock, stride_ - begin), at = index * sum_blocks_ + block;
    kernels_.exp_sums(raw(index) + begin, count, statistics_[index].max, &sums_[at], &moments_[at]);
}

// The blocks' sums in order; entropy.
void OutputHeads::summarise(int index) {
    const float* sums = sums_.data() + index * sum_blocks_;
    const float* moments = moments_.data() + index * sum_blocks_;
    const float z = std::accumulate(sums + 1, sums + sum_blocks_, sums[0]);
    const float moment = std::accumulate(moments + 1, moments + sum_blocks_, moments[0]);
    statistics_[index].z = z;
    output(index).entropy = kernels_.log(z) - moment / z;
}

void OutputHeads::choose(int index, const Request& request, Chooser& chooser) {
    const Row& row = placed(index).row;
    const Choice& choice = choice_of(row, request);
    const Statistics& of = statistics_[index];
    Output& out = output(index);
    out.token = choice.plain() ? argmax(index) : chooser.choose(entries(index), choice, row.position + 1);
    out.probability = kernels_.exp(raw(index)[out.token] - of.max) / of.z;
    for (const int id : best(index, request.top, chooser)) out.top.emplace_back(id, raw(index)[id]);
}

// The first entry of the first block that reaches the maximum.
int OutputHeads::argmax(int index) const {
    const float max = statistics_[index].max;
    const float* maxima = block_max_.data() + index * blocks_;
    const int begin = int(std::find(maxima, maxima + blocks_, max) - maxima) * kBlock;
    return int(std::find(raw(index) + begin, raw(index) + stride_, max) - raw(index));
}

void OutputHeads::choose_chained(int index, const Request& request) {
    const PlacedRow& row = placed(index);
    const Statistics& of = statistics_[index];
    const std::vector<int>& best = best_[index];
    const int hidden = context_.shape.hidden, count = std::min(kCandidates, int(best.size()));
    Chooser& chooser = choosers_[0];

    chain_shift(index, outputs_[row.parent].token);
    alignas(64) float scores[kCandidates], before[kCandidates], after[kCandidates];
    std::int32_t ids[kCandidates];
    std::fill(scores, scores + kCandidates, kNever);
    std::fill(before, before + kCandidates, kNever);
    std::fill(ids, ids + kCandidates, std::numeric_limits<std::int32_t>::max());
    kernels_.dots(candidates(index), hidden, count, shift_.data(), hidden, scores);
    for (int i = 0; i < count; ++i) {
        ids[i] = best[i];
        before[i] = raw(index)[best[i]];
        scores[i] = before[i] + scores[i];
    }
    const Entries scored = {ids, scores, count, false};
    const int place = chooser.choose(scored, choice_of(row.row, request), row.row.position + 1);

    kernels_.weights(before, ids, kCandidates, of.max, kNoCut, before);
    kernels_.weights(scores, ids, kCandidates, kernels_.maximum(scores, kCandidates), kNoCut, after);
    const float share = kernels_.blocked_sum(before, kCandidates) / of.z;
    Output& out = output(index);
    out.token = ids[place];
    out.probability = after[place] / kernels_.blocked_sum(after, kCandidates) * share;
    for (const int i : chooser.best(scored, std::min(count, request.top))) out.top.emplace_back(ids[i], scores[i]);
    for (int i = count; i < request.top && i < int(best.size()); ++i) out.top.emplace_back(best[i], raw(index)[best[i]]);
}

// What the chain adds to the head's input once the proposal before the row is `parent`: shift_[hidden].
void OutputHeads::chain_shift(int index, int parent) {
    const int hidden = context_.shape.hidden, rank = context_.shape.chain_rank;
    const float* a = context_.weights.chain_hidden.data();
    context_.embed(parent, given_.data());
    kernels_.norm(given_.data(), ones_.data(), hidden, context_.shape.eps, given_.data());
    // Equal shares, so that each thread finds its part of the weights in its own cache for the next row.
    const auto share = [&](int n) { return (n + context_.pool.threads() - 1) / context_.pool.threads(); };
    context_.pool.parallel(rank, share(rank), [&](int begin, int end, int) {
        const float* rows = a + std::size_t(begin) * 2 * hidden + hidden;
        kernels_.dots(rows, 2 * hidden, end - begin, given_.data(), hidden, inner_.data() + begin);
    });
    kernels_.add(inner_.data(), own(index), rank);
    kernels_.silu(inner_.data(), rank);
    context_.pool.parallel(hidden, share(hidden), [&](int begin, int end, int) {
        const float* b = context_.weights.chain_output.data() + std::size_t(begin) * rank;
        kernels_.dots(b, rank, end - begin, inner_.data(), rank, shift_.data() + begin);
    });
}

}  // namespace bitmtp
