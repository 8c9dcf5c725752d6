// Runs a model written by test_cpu_neon.py and prints what it predicts, floats in hexadecimal.
//
// The tokens run as one causal pass that is materialized, then one by one again as a second text, sampled.
#include <cstdio>
#include <iostream>

#include "model_file.hpp"

using namespace bitmtp;

namespace {

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
