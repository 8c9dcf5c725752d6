#include "weights.hpp"

#include <cstring>
#include <stdexcept>

namespace bitmtp {

namespace {

// The tensors of a checkpoint by name, under a prefix.
class Reader {
public:
    Reader(const Tensors& tensors, std::string prefix) : tensors_(tensors), prefix_(std::move(prefix)) {}

    const Tensor* find(const std::string& name) const {
        const auto at = tensors_.find(prefix_ + name);
        return at == tensors_.end() ? nullptr : &at->second;
    }

    const Tensor& get(const std::string& name) const {
        const Tensor* tensor = find(name);
        if (!tensor) throw std::invalid_argument("tensor " + prefix_ + name + " is missing");
        return *tensor;
    }

    Floats floats(const std::string& name) const {
        const Tensor& tensor = get(name);
        const auto* data = static_cast<const float*>(tensor.data);
        return Floats(data, data + tensor.size());
    }

    Floats optional(const std::string& name) const { return find(name) ? floats(name) : Floats(); }

    MatrixSource matrix(const std::string& name, int in, int step_inputs) const {
        const Tensor& weight = get(name + ".weight");
        const Tensor& scale = get(name + ".scale");
        const Tensor* minimum = find(name + ".minimum");
        return {static_cast<const std::uint8_t*>(weight.data), int(weight.shape[0]), in, int(weight.shape[1] * 8 / in),
                static_cast<const float*>(scale.data), int(scale.size()), scale.shape.size() == 2,
                minimum ? static_cast<const float*>(minimum->data) : nullptr, step_inputs};
    }

private:
    const Tensors& tensors_;
    std::string prefix_;
};

AlignedBuffer read_halves(const Tensor& tensor) {
    AlignedBuffer half(std::size_t(tensor.size()) * 2);
    std::memcpy(half.data(), tensor.data, half.bytes());
    return half;
}

Vocabulary read_vocabulary(const Reader& reader, const std::string& name, const Shape& shape, bool dense) {
    Vocabulary vocabulary;
    if (!shape.half_tables) {
        vocabulary.packed = pack_matrix(reader.matrix(name, shape.hidden, shape.step_inputs), dense);
        return vocabulary;
    }
    vocabulary.half = read_halves(reader.get(name + ".weight"));
    return vocabulary;
}

// Matrices one below the other: neighbours that are alike together, in the order given.
std::vector<PackedMatrix> pack_below(const std::vector<MatrixSource>& parts, bool dense) {
    std::vector<PackedMatrix> packed;
    for (std::size_t begin = 0, end = 0; begin < parts.size(); begin = end) {
        while (end < parts.size() && parts[begin].alike(parts[end])) ++end;
        packed.push_back(pack_stacked({parts.begin() + begin, parts.begin() + end}, dense && end - begin == parts.size()));
    }
    return packed;
}

Layer read_layer(const Reader& reader, const Shape& shape, bool dense) {
    const auto matrix = [&](const char* name, int in) { return reader.matrix(name, in, shape.step_inputs); };
    const int hidden = shape.hidden;
    Layer layer;
    layer.qkv = pack_below(
        {matrix("attention.q", hidden), matrix("attention.k", hidden), matrix("attention.v", hidden)}, dense);
    layer.o = pack_matrix(matrix("attention.o", shape.attention()), dense);
    layer.gate_up = pack_interleaved(matrix("mlp.gate", hidden), matrix("mlp.up", hidden), dense);
    layer.down = pack_matrix(matrix("mlp.down", shape.inner), dense);
    layer.q_bias = reader.optional("attention.q.bias");
    layer.k_bias = reader.optional("attention.k.bias");
    layer.v_bias = reader.optional("attention.v.bias");
    layer.attention_norm = reader.floats("attention_norm.weight");
    layer.mlp_norm = reader.floats("mlp_norm.weight");
    layer.attention_sub_norm = reader.optional("attention.sub_norm.weight");
    layer.mlp_sub_norm = reader.optional("mlp.sub_norm.weight");
    layer.q_norm = reader.optional("attention.q_norm.weight");
    layer.k_norm = reader.optional("attention.k_norm.weight");
    return layer;
}

}  // namespace

std::int64_t Tensor::size() const {
    std::int64_t size = 1;
    for (const std::int64_t extent : shape) size *= extent;
    return size;
}

Weights::Weights(const Shape& shape, const Tensors& tensors, bool dense) {
    const Reader reader(tensors, "");
    embedding = read_vocabulary(reader, "embedding", shape, dense);
    if (!shape.tied) head = read_vocabulary(reader, "head", shape, dense);
    for (int index = 0; index < shape.layers; ++index) {
        layers.push_back(read_layer(Reader(tensors, "layers." + std::to_string(index) + "."), shape, dense));
    }
    norm = reader.floats("norm.weight");
    masks = reader.optional("mask_embedding.weight");
    for (int index = 0; shape.medusa && index < shape.block - 1; ++index) {
        const Reader head(tensors, "medusa." + std::to_string(index) + ".");
        medusa.push_back({read_halves(head.get("weight")), head.floats("bias")});
    }
    chain_hidden = reader.optional("chain.hidden.weight");
    chain_output = reader.optional("chain.output.weight");
    cos = reader.floats("rope.cos");
    sin = reader.floats("rope.sin");
}

std::size_t Weights::bytes() const {
    std::size_t total = embedding.packed.bytes() + embedding.half.bytes() + head.packed.bytes() + head.half.bytes();
    for (const Layer& layer : layers) {
        for (const PackedMatrix& part : layer.qkv) total += part.bytes();
        total += layer.o.bytes() + layer.gate_up.bytes() + layer.down.bytes();
    }
    for (const MedusaHead& head : medusa) total += head.weight.bytes() + sizeof(float) * head.bias.size();
    return total + sizeof(float) * (masks.size() + chain_hidden.size() + chain_output.size());
}

}  // namespace bitmtp
