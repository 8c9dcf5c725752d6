// What a pass's rows predict: logits, probability, entropy, the chosen token, alternatives, the chain.
#pragma once

#include <utility>
#include <vector>

#include "backbone.hpp"
#include "choose.hpp"

namespace bitmtp {

constexpr int kCandidates = 16;  ///< that the chain re-scores

/// An alternative token and its logit.
using Alternative = std::pair<std::int32_t, float>;

/// What one row predicts for the position after its own.
struct Output {
    std::int32_t token = -1;
    float probability = 0;
    float entropy = 0;
    float raw = 0;                 ///< logit of the row's target, or of the token
    double total = 0;              ///< logarithm of the sum of e^logit
    std::vector<Alternative> top;  ///< best first
};

/// How the rows of a pass choose.
struct Request {
    std::vector<Choice> choices;  ///< by Row::choice
    int top = 0;                  ///< alternatives to return
};

/// The output head and its scratch memory.
class OutputHeads {
public:
    explicit OutputHeads(Context& context);

    /// Outputs by place in the pass; rows without a head keep the default.
    std::vector<Output> run(const std::vector<PlacedRow>& pass, const Backbone& backbone, const Request& request);

    /// Raw logits [vocab] of the index-th row with a head of the last pass.
    const float* logits(int index) const { return raw(index); }

private:
    /// Of a row's raw distribution: the largest logit, and the sum of exp(logit - max).
    struct Statistics {
        float max;
        float z;
    };

    void prepare(const Backbone& backbone, int index);
    void quantise(int index);
    void guess();
    void multiply_block(int block);
    void multiply_half(int begin, int end);
    void sum_block(int index, int block);
    void summarise(int index);
    void choose(int index, const Request& request, Chooser& chooser);
    void find_candidates(int index, const Request& request, Chooser& chooser);
    std::vector<int> best(int index, int count, Chooser& chooser);
    void prepare_chain(const std::vector<int>& indices);
    void run_chain(const Request& request);
    void choose_chained(int index, const Request& request);
    void chain_shift(int index, int parent);
    int argmax(int index) const;

    const PlacedRow& placed(int index) const { return (*pass_)[rows_[index]]; }
    Output& output(int index) { return outputs_[rows_[index]]; }
    bool chained(int index) const;
    Entries entries(int index) const { return {ids_.data(), raw(index), context_.shape.vocab, true}; }
    float* raw(int index) const { return logits_ + std::size_t(index) * stride_; }
    float* own(int index) { return own_.data() + std::size_t(index) * context_.shape.chain_rank; }
    float* candidates(int index) { return candidates_.data() + std::size_t(index) * kCandidates * context_.shape.hidden; }
    float* guessed(int index) { return guessed_.data() + std::size_t(index) * context_.shape.hidden; }
    float* normed(int index) { return normed_.data() + std::size_t(index) * context_.shape.hidden; }

    Context& context_;
    const Kernels& kernels_;
    const Vocabulary& vocabulary_;
    const std::vector<PlacedRow>* pass_ = nullptr;
    std::vector<int> rows_;  ///< places in the pass of the rows with a head; `index` below counts these
    std::vector<Output> outputs_;
    int stride_, blocks_, sum_blocks_;
    AlignedBuffer logits_memory_;
    float* logits_;  ///< [64][stride], `kNever` behind the vocabulary
    QuantBuffer quant_;
    Floats normed_;          ///< [64][hidden]
    Floats guessed_;         ///< [64][hidden], what Medusa heads add to their anchors
    std::vector<int> guesses_;  ///< indices of their rows
    Floats block_max_;       ///< [64][blocks]
    Floats sums_, moments_;  ///< [64][sum blocks]
    std::vector<Statistics> statistics_;
    std::vector<std::int32_t> ids_;  ///< 0, 1, 2, …
    std::vector<Chooser> choosers_;  ///< one for each thread
    // The chain's: what does not depend on the proposal before, for each row; and scratch of the row at hand
    std::vector<std::vector<int>> best_;  ///< ids by raw logit, the candidates first
    Floats own_;                          ///< [64][rank], the row's own part of the inner layer
    Floats candidates_;                   ///< [64][16][hidden], the candidates' rows of the head
    Floats ones_, given_, inner_, shift_;
};

}  // namespace bitmtp
