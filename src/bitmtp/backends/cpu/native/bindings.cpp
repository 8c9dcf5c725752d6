// The Python module bitmtp.backends.cpu._native: plain tuples in, plain tuples out (backend.py names their fields).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "loop.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using bitmtp::Choice;
using bitmtp::Model;
using bitmtp::Output;
using bitmtp::Row;

using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bits = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using RowTuple = std::tuple<int, int, int, std::uint64_t, int, int, std::optional<std::pair<int, int>>, int>;
using ChoiceTuple = std::tuple<float, int, float, float, float, float, float, std::uint64_t, int, Ids, Ids,
                               std::vector<std::pair<std::int32_t, float>>, std::optional<Bits>>;
using OutputTuple = std::tuple<std::int32_t, float, float, std::vector<bitmtp::Alternative>>;

bitmtp::Shape read_shape(nb::handle config) {
    const auto number = [&](const char* name) { return nb::cast<int>(config.attr(name)); };
    const auto text = [&](const char* name) { return nb::cast<std::string>(config.attr(name)); };
    bitmtp::Shape shape;
    shape.vocab = number("vocab_size");
    shape.hidden = number("hidden_size");
    shape.inner = number("intermediate_size");
    shape.layers = number("num_layers");
    shape.heads = number("num_heads");
    shape.kv_heads = number("num_kv_heads");
    shape.head_dim = number("head_dim");
    shape.block = number("block_size");
    shape.chain_rank = number("chain_rank");
    shape.step_inputs = text("activation_scale") == "group" ? number("group_size") : 0;
    shape.half_tables = number("embedding_bits") == 16;
    shape.eps = nb::cast<float>(config.attr("norm_eps"));
    shape.relu2 = text("activation") == "relu2";
    shape.tied = nb::cast<bool>(config.attr("tie_embeddings"));
    shape.half_kv = text("kv_type") == "float16";
    shape.medusa = text("drafter") == "medusa";
    return shape;
}

void construct(Model* self, nb::object config, nb::dict arrays, int threads) {
    const bitmtp::Shape shape = read_shape(config);
    std::vector<AnyArray> alive;
    bitmtp::Tensors tensors;
    for (const auto& [name, array] : arrays) {
        alive.push_back(nb::cast<AnyArray>(array));
        const AnyArray& a = alive.back();
        tensors[nb::cast<std::string>(name)] = {a.data(), {a.shape_ptr(), a.shape_ptr() + a.ndim()}};
    }
    const nb::gil_scoped_release release;
    new (self) Model(shape, tensors, threads);
}

Row read_row(const RowTuple& tuple) {
    const auto& [sequence, token, position, visible, since, head, window, choice] = tuple;
    Row row{sequence, token, position, visible, since, bitmtp::Head(head), window.has_value(), 0, 0, choice};
    if (window) std::tie(row.sinks, row.recent) = *window;
    return row;
}

Choice read_choice(const ChoiceTuple& tuple) {
    Choice c;
    Ids seen, counts;
    std::optional<Bits> allowed;
    std::tie(c.temperature, c.top_k, c.top_p, c.min_p, c.repetition, c.presence, c.frequency, c.seed, c.text, seen,
             counts, c.bias, allowed) = tuple;
    c.seen.assign(seen.data(), seen.data() + seen.size());
    c.counts.assign(counts.data(), counts.data() + counts.size());
    if (allowed) c.allowed.assign(allowed->data(), allowed->data() + allowed->size());
    return c;
}

std::vector<OutputTuple> step(Model& model, const std::vector<RowTuple>& tuples,
                              const std::vector<ChoiceTuple>& choices, int top, std::optional<Logits> logits) {
    std::vector<Row> rows;
    for (const RowTuple& tuple : tuples) rows.push_back(read_row(tuple));
    bitmtp::Request request{{}, top};
    for (const ChoiceTuple& tuple : choices) request.choices.push_back(read_choice(tuple));
    std::vector<OutputTuple> results;
    const nb::gil_scoped_release release;
    for (Output& out : model.step(rows, request, logits ? logits->data() : nullptr)) {
        results.emplace_back(out.token, out.probability, out.entropy, std::move(out.top));
    }
    return results;
}

std::tuple<std::vector<int>, std::vector<int>, std::tuple<double, double, double>> run(
    Model& model, core::Batch& batch, const std::vector<core::Owner*>& texts, int width, int prompt_rows, double milliseconds) {
    const nb::gil_scoped_release release;
    std::vector<core::Owner*> order = texts;
    bitmtp::Ran ran = bitmtp::run(model, batch, order, width, prompt_rows, milliseconds);
    std::vector<int> places;
    for (const core::Owner* each : order)
        places.push_back(int(std::find(texts.begin(), texts.end(), each) - texts.begin()));
    return {std::move(ran.widths), std::move(places), {ran.milliseconds[0], ran.milliseconds[1], ran.milliseconds[2]}};
}

}  // namespace

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // a model that lives until the interpreter ends is no fault
    module.doc() = "C++ kernels of the CPU backend.";
    nb::class_<Model>(module, "Model", "Weights, sequences and passes; see backend.py.")
        .def("__init__", construct, "config"_a, "tensors"_a, "threads"_a)
        .def_prop_ro("isa", &Model::isa)
        .def_prop_ro("threads", &Model::threads)
        .def_prop_ro("weight_bytes", &Model::weight_bytes)
        .def_prop_ro("kv_bytes", &Model::kv_bytes)
        .def("open", &Model::open)
        .def("close", &Model::close, "sequence"_a)
        .def("length", &Model::length, "sequence"_a)
        .def("truncate", &Model::truncate, "sequence"_a, "length"_a)
        .def("fork", &Model::fork, "sequence"_a, "length"_a)
        .def("materialize", &Model::materialize, "sequence"_a, "indices"_a)
        .def("step", step, "rows"_a, "choices"_a, "top"_a, "logits"_a.none())
        .def("run", run, "batch"_a, "texts"_a, "width"_a, "prompt_rows"_a, "milliseconds"_a);
}
