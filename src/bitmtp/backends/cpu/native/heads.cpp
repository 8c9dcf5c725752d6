#include "heads.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

namespace bitmtp {

namespace {

constexpr int kBlock = 1024;      // entries of a task of the head product
constexpr int kCandidates = 16;   // that the chain re-scores
const Choice kGreedy;

const Choice& choice_of(const Row& row, const Request& request) {
    return row.choice < 0 ? kGreedy : request.choices[row.choice];
}

}  // namespace

OutputHeads::OutputHeads(Context& context)
    : context_(context),
      kernels_(context.kernels),
      vocabulary_(context.weights.output()),
      stride_(round_up(context.shape.vocab, tile_rows)),
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
}

std::vector<Output> OutputHeads::run(const std::vector<PlacedRow>& pass, const Backbone& backbone, const Request& request) {
    pass_ = &pass;
    outputs_.assign(pass.size(), {});
    rows_.clear();
    for (int row = 0; row < int(pass.size()); ++row) {
        if (pass[row].row.head != Head::none) rows_.push_back(row);
    }
    const int count = int(rows_.size());
    Pool& pool = context_.pool;
    context_.by_rows(count, [&](int index) { prepare(backbone, index); });
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
            if (!chained(index)) choose(index, request, choosers_[thread]);
        }
    });
    run_chain(request);
    return std::move(outputs_);
}

// Chained rows one by one: each needs the token of the row before it.
void OutputHeads::run_chain(const Request& request) {
    std::vector<int> order;
    for (int index = 0; index < int(rows_.size()); ++index) {
        if (chained(index)) order.push_back(index);
    }
    std::sort(order.begin(), order.end(), [&](int a, int b) { return placed(a).row.position < placed(b).row.position; });
    for (const int index : order) choose_chained(index, request);
}

bool OutputHeads::chained(int index) const {
    const PlacedRow& row = placed(index);
    return context_.shape.chain_rank > 0 && row.row.token < 0 && row.parent >= 0 &&
           (*pass_)[row.parent].row.head != Head::none;
}

void OutputHeads::prepare(const Backbone& backbone, int index) {
    const int hidden = context_.shape.hidden;
    const PackedMatrix& matrix = vocabulary_.packed;
    kernels_.norm(backbone.hidden(rows_[index]), context_.weights.norm.data(), hidden, context_.shape.eps, normed(index));
    if (vocabulary_.is_half()) return;
    kernels_.quantise(normed(index), hidden, matrix.group, matrix.groups, quant_.view(matrix, int(rows_.size())), index);
}

// Logits of 1,024 entries for all rows, and their maxima.
void OutputHeads::multiply_block(int block) {
    const int begin = block * kBlock, end = std::min(begin + kBlock, stride_), vocab = context_.shape.vocab;
    const int count = int(rows_.size());
    if (vocabulary_.is_half()) {
        multiply_half(begin, std::min(end, vocab));
    } else {
        const QuantRows input = quant_.view(vocabulary_.packed, count);
        kernels_.product(vocabulary_.packed, input, begin / tile_rows, end / tile_rows, logits_, stride_);
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
    for (const int id : chooser.best(entries(index), request.top)) out.top.emplace_back(id, raw(index)[id]);
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
    const int hidden = context_.shape.hidden;
    Chooser& chooser = choosers_[0];
    const std::vector<int> best = chooser.best(entries(index), std::max(kCandidates, request.top));
    const int count = std::min(kCandidates, int(best.size()));

    const Floats shift = chain_shift(index, outputs_[row.parent].token);
    alignas(64) float scores[kCandidates], before[kCandidates], after[kCandidates];
    std::int32_t ids[kCandidates];
    Floats weights(hidden);
    std::fill(scores, scores + kCandidates, kNever);
    std::fill(before, before + kCandidates, kNever);
    std::fill(ids, ids + kCandidates, std::numeric_limits<std::int32_t>::max());
    for (int i = 0; i < count; ++i) {
        ids[i] = best[i];
        before[i] = raw(index)[best[i]];
        context_.vocabulary_row(vocabulary_, best[i], weights.data());
        scores[i] = before[i] + kernels_.dot(shift.data(), weights.data(), hidden);
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

// What the chain adds to the head's input once the proposal before the row is `parent`: [hidden].
Floats OutputHeads::chain_shift(int index, int parent) {
    const int hidden = context_.shape.hidden, rank = context_.shape.chain_rank;
    const Floats ones(hidden, 1.0f);
    Floats given(hidden), inner(rank), shift(hidden);
    context_.embed(parent, given.data());
    kernels_.norm(given.data(), ones.data(), hidden, context_.shape.eps, given.data());
    for (int i = 0; i < rank; ++i) {
        const float* a = context_.weights.chain_hidden.data() + std::size_t(i) * 2 * hidden;
        inner[i] = kernels_.dot(a, normed(index), hidden) + kernels_.dot(a + hidden, given.data(), hidden);
    }
    kernels_.silu(inner.data(), rank);
    for (int j = 0; j < hidden; ++j) {
        shift[j] = kernels_.dot(context_.weights.chain_output.data() + std::size_t(j) * rank, inner.data(), rank);
    }
    return shift;
}

}  // namespace bitmtp
