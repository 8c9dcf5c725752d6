// Runs a model written by test_cpu_neon.py and prints what it predicts, floats in hexadecimal.
//
// Input: lines "name dimensions… : bytes" each followed by that many raw bytes, first the shape's numbers as one int32
// tensor; the token ids are the tensor "tokens". The tokens run as one causal pass that is materialized, then one by
// one again as a second text, sampled.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>

#include "model.hpp"

using namespace bitmtp;

namespace {

std::map<std::string, std::vector<char>> memory;

Tensors read(const char* path) {
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

std::vector<int> numbers(const Tensors& tensors, const char* name) {
    const Tensor& tensor = tensors.at(name);
    const auto* data = static_cast<const std::int32_t*>(tensor.data);
    return {data, data + tensor.size()};
}

Shape shape_of(const std::vector<int>& n) {
    Shape shape;
    int* fields[] = {&shape.vocab, &shape.hidden, &shape.inner, &shape.layers, &shape.heads, &shape.kv_heads,
                     &shape.head_dim, &shape.block, &shape.chain_rank, &shape.embedding_bits};
    for (std::size_t i = 0; i < n.size(); ++i) *fields[i] = n[i];
    shape.tied = false;
    return shape;
}

void print(const Output& out) { std::printf("%d %a %a\n", out.token, double(out.probability), double(out.entropy)); }

}  // namespace

int main(int count, char** arguments) {
    if (count != 2) return 2;
    const Tensors tensors = read(arguments[1]);
    Model model(shape_of(numbers(tensors, "shape")), tensors, 2);
    std::cerr << model.isa() << "\n";
    const std::vector<int> tokens = numbers(tensors, "tokens");

    const int first = model.open();
    std::vector<Row> rows;
    std::vector<int> indices;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        rows.push_back({first, tokens[i], int(i), (std::uint64_t(2) << i) - 1});
        indices.push_back(int(i));
    }
    for (const Output& out : model.step(rows, {}, nullptr)) print(out);
    model.materialize(first, indices);

    Choice choice;
    choice.temperature = 0.8f;
    choice.top_p = 0.9f;
    choice.seed = 7;
    const int second = model.open();
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        Row row{second, tokens[i], int(i), 1};
        row.choice = 0;
        print(model.step({row}, {{choice}, 0}, nullptr)[0]);
        model.materialize(second, {0});
    }
}
