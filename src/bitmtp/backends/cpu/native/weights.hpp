// A model's tensors in the form that the kernels read.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels.hpp"

namespace bitmtp {

/// The fields of ModelConfig that the arithmetic needs.
struct Shape {
    int vocab = 0;
    int hidden = 0;
    int inner = 0;
    int layers = 0;
    int heads = 0;
    int kv_heads = 0;
    int head_dim = 0;
    int block = 1;
    int chain_rank = 0;
    int step_inputs = 0;     ///< that share a step of the activations; 0: all of a row
    bool half_tables = false;  ///< embedding and head are float16
    float eps = 1e-5f;
    bool relu2 = false;
    bool tied = true;
    bool half_kv = true;
    bool medusa = false;  ///< masks are rows of heads on their anchor, not rows of the layers

    int group() const { return heads / kv_heads; }  ///< query heads to a kv head
    int attention() const { return heads * head_dim; }
    int kv() const { return kv_heads * head_dim; }
};

/// A tensor of the checkpoint; borrowed memory, C order.
struct Tensor {
    const void* data;
    std::vector<std::int64_t> shape;

    std::int64_t size() const;
};
using Tensors = std::map<std::string, Tensor>;

using Floats = std::vector<float>;

/// `embedding` or `head`: `[vocab, hidden]` integers, or float16 where the head is a float product.
struct Vocabulary {
    PackedMatrix packed;
    AlignedBuffer half;

    bool is_half() const { return half.bytes() > 0; }
    const std::uint16_t* half_row(int row, int hidden) const {
        return reinterpret_cast<const std::uint16_t*>(half.data()) + std::ptrdiff_t(row) * hidden;
    }
};

/// One layer. Optional tensors are empty when the model has none.
struct Layer {
    std::vector<PackedMatrix> qkv;  ///< q, k, v one below the other, each from a new tile; as few as their layouts allow
    PackedMatrix o;
    PackedMatrix gate_up;  ///< tile by tile in turns
    PackedMatrix down;
    Floats q_bias, k_bias, v_bias;
    Floats attention_norm, mlp_norm, attention_sub_norm, mlp_sub_norm, q_norm, k_norm;
};

/// A Medusa head: float16 [hidden][hidden], and its bias.
struct MedusaHead {
    AlignedBuffer weight;
    Floats bias;
};

/// Everything a pass reads.
struct Weights {
    /// `dense`: pack ternary matrices densely where they can be.
    Weights(const Shape& shape, const Tensors& tensors, bool dense);

    std::size_t bytes() const;
    const Vocabulary& output() const { return head.packed.out || head.is_half() ? head : embedding; }

    Vocabulary embedding;
    Vocabulary head;  ///< empty where the embedding is the head
    std::vector<Layer> layers;
    Floats norm;
    Floats masks;                      ///< [block - 1][hidden]
    std::vector<MedusaHead> medusa;    ///< by depth
    Floats chain_hidden, chain_output;  ///< [rank][2 * hidden], [hidden][rank]
    Floats cos, sin;                   ///< [context][head_dim / 2]
};

}  // namespace bitmtp
