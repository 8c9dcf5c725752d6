// Reads a model that model_file.py wrote.
//
// Lines "name dimensions… : bytes", each followed by that many raw bytes; among the tensors are the shape's numbers
// ("shape", int32) and some token ids ("tokens").
#pragma once

#include <fstream>
#include <iterator>
#include <sstream>

#include "model.hpp"

namespace bitmtp {

inline std::map<std::string, std::vector<char>> memory;

inline Tensors read(const char* path) {
    std::ifstream file(path, std::ios::binary);
    Tensors tensors;
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string name, word;
        words >> name;
        std::vector<std::int64_t> shape;
        while (words >> word && word != ":") shape.push_back(std::stoll(word));
        std::size_t bytes;
        words >> bytes;
        memory[name].resize(bytes);
        file.read(memory[name].data(), std::streamsize(bytes));
        tensors[name] = {memory[name].data(), shape};
    }
    return tensors;
}

inline std::vector<int> numbers(const Tensors& tensors, const char* name) {
    const Tensor& tensor = tensors.at(name);
    const auto* data = static_cast<const std::int32_t*>(tensor.data);
    return {data, data + tensor.size()};
}

inline Shape shape_of(const std::vector<int>& n) {
    Shape shape;
    int* fields[] = {&shape.vocab, &shape.hidden, &shape.inner, &shape.layers, &shape.heads, &shape.kv_heads,
                     &shape.head_dim, &shape.block, &shape.chain_rank, &shape.step_inputs};
    for (std::size_t i = 0; i < std::size(fields); ++i) *fields[i] = n[i];
    shape.half_tables = n.back();
    shape.tied = false;
    return shape;
}

}  // namespace bitmtp
