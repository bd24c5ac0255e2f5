// Python module ep_libtorch: torch tensors, and a torch.distributed process group wrapped once as Ranks.
#include <string>

#include "ep_libtorch.hpp"
#include "fived/torch/python.hpp"

PYBIND11_MODULE(ep_libtorch, module) {
    namespace py = pybind11;
    using namespace py::literals;
    using fived::RanksPtr, fived::Parameters, fived::Waiting, fived::Exchange, fived::ExchangePtr;

    module.doc() =
        "Dropless expert parallelism in C++ on LibTorch's autograd and c10d. On all ranks the same calls, "
        "each with its own tokens; they raise ValueError for what does not fit.";
    fived::add_ranks(module, "ep");
    module.def("is_expert", &fived::is_expert, "name"_a,
               "Whether the parameter of that name is stacked by expert, and so cut on dimension 0.");
    module.def(
        "split",
        [](const Parameters& whole, const RanksPtr& ranks) { return fived::split_experts(whole, *ranks); },
        "whole"_a, "ranks"_a.none(false),
        "{name: parameter}, whole and the same on all ranks, to {name: this rank's piece, a leaf}: its "
        "experts, and all of the rest.");
    py::class_<Exchange, ExchangePtr>(module, "Exchange", py::module_local(),
                                      "Who sends how many rows to whom; of this rank's, counts_E for each "
                                      "expert.")
        .def(py::init<const at::Tensor&, RanksPtr>(), "counts_E"_a, "ranks"_a.none(false), Waiting())
        .def_property_readonly("counts", &Exchange::counts, "Rows that come for each expert of this rank.");
    module.def("dispatch", &fived::dispatch, "rows_RD"_a, "exchange"_a.none(false), Waiting(),
               "This rank's rows by expert, to the rows of all ranks for its experts, by expert.");
    module.def("collect", &fived::collect, "results_RD"_a, "exchange"_a.none(false), Waiting(),
               "The way back, in the order of the rows before.");
    module.def("experts", &fived::experts, "rows_RD"_a, "counts_e"_a, "mine"_a, "prefix"_a = "", Waiting(),
               "The MLPs of this rank's experts on rows sorted by expert.");
    module.def(
        "compute",
        [](const at::Tensor& rows, const at::Tensor& counts, const Parameters& mine, const RanksPtr& ranks,
           const std::string& prefix) { return fived::compute(rows, counts, mine, prefix, ranks); },
        "rows_RD"_a, "counts_E"_a, "mine"_a, "ranks"_a.none(false), "prefix"_a = "", Waiting(),
        "Dispatch, experts and collect: what `compute` of common/models/moe.py is.");
    module.def(
        "mixture",
        [](const at::Tensor& x, const Parameters& mine, int k, const std::string& router,
           const RanksPtr& ranks, const std::string& prefix) {
            return fived::mixture(x, mine, prefix, k, fived::parse<fived::Weights>("router", router), ranks);
        },
        "x_BSD"_a, "mine"_a, "k"_a, "router"_a, "ranks"_a.none(false), "prefix"_a = "", Waiting(),
        "MoE of common/models/moe.py from the pieces that split() gave; router: softmax, renormalised.");
    module.def(
        "sum_gradients", [](const Parameters& mine, const RanksPtr& ranks) { sum_gradients(mine, *ranks); },
        "mine"_a, "ranks"_a.none(false), Waiting(),
        "After the last backward pass: sums the gradients of all but the experts over ranks.");
}
