// Python module tp_libtorch: torch tensors, and a torch.distributed process group wrapped once as Ranks.
#include <optional>

#include "fived/torch/python.hpp"
#include "tp_libtorch.hpp"

PYBIND11_MODULE(tp_libtorch, module) {
    namespace py = pybind11;
    using namespace py::literals;
    using fived::RanksPtr, fived::Parameters, fived::Waiting;

    module.doc() =
        "Megatron's tensor parallelism in C++ on LibTorch's autograd and c10d. On all ranks the same calls, "
        "with "
        "the same x; they raise ValueError for what does not fit.";
    fived::add_ranks(module, "tp");
    module.def("split_dimension", &fived::split_dimension, "name"_a,
               "The dimension along which the parameter of that name is cut; -1: it is whole on all ranks.");
    module.def(
        "split", [](const Parameters& whole, const RanksPtr& ranks) { return fived::split(whole, *ranks); },
        "whole"_a, "ranks"_a.none(false),
        "{name: parameter}, whole and the same on all ranks, to {name: this rank's piece, a leaf}.");
    module.def("copy", &fived::copy, "x"_a, "ranks"_a.none(false), Waiting(),
               "The identity, whose gradient is all-reduced.");
    module.def("reduce", &fived::reduce, "x"_a, "ranks"_a.none(false), Waiting(),
               "The all-reduce, whose gradient passes as it is.");
    module.def(
        "column_parallel",
        [](const at::Tensor& x, const fived::Tensors& weights, const fived::Tensors& biases,
           const RanksPtr& ranks) { return fived::column_parallel(x, weights, biases, ranks); },
        "x_BSD"_a, "weights"_a, "biases"_a, "ranks"_a.none(false), Waiting(),
        "y_BSf of each weight_fD; the sum of dx travels while dW are computed.");
    module.def(
        "row_parallel",
        [](const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
           const RanksPtr& ranks) {
            return fived::row_parallel(x, weight, bias.value_or(at::Tensor()), ranks);
        },
        "x_BSf"_a, "weight_Df"_a, "bias_D"_a, "ranks"_a.none(false), Waiting(),
        "y_BSD, summed over ranks, plus bias_D, if there is one, once.");
    module.def("embedding", &fived::embedding, "tokens_BS"_a, "weight_vD"_a, "vocabulary"_a,
               "ranks"_a.none(false), Waiting(), "x_BSD from a table of which each rank has some rows.");
    module.def("cross_entropy_sum", &fived::cross_entropy_sum, "logits_BSv"_a, "targets_BS"_a, "vocabulary"_a,
               "ranks"_a.none(false), "ignore_index"_a = -100, Waiting(),
               "(sum of the cross-entropies in nats, number of targets) of logits that are split along the "
               "vocabulary.");
    module.def(
        "layer",
        [](const at::Tensor& x, const Parameters& mine, int heads, const RanksPtr& ranks,
           const std::string& prefix) { return fived::layer(x, mine, prefix, heads, ranks); },
        "x_BSD"_a, "mine"_a, "heads"_a, "ranks"_a.none(false), "prefix"_a = "", Waiting(),
        "GPT-2's layer, as Layer of common/models/transformer.py, from the pieces that split() gave.");
}
