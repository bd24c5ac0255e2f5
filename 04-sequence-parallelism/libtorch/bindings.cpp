// Python module sp_libtorch: torch tensors, and a torch.distributed process group wrapped once as Ranks.
#include <string>

#include "fived/torch/python.hpp"
#include "sp_libtorch.hpp"

PYBIND11_MODULE(sp_libtorch, module) {
    namespace py = pybind11;
    using namespace py::literals;
    using fived::Kernel, fived::Order, fived::parse, fived::RanksPtr;

    module.doc() = "Ring attention in C++ on LibTorch's autograd and c10d.";
    fived::add_ranks(module, "sp");
    module.def(
        "places",
        [](std::int64_t sequence, const RanksPtr& ranks, const std::string& order) {
            return fived::places(sequence, parse<Order>("order", order), ranks->rank(), ranks->size());
        },
        "sequence"_a, "ranks"_a.none(false), "order"_a = "contiguous",
        "Indices, in rising order, of this rank's positions. Raises ValueError where the sequence does not "
        "divide.");
    module.def(
        "ring_attention",
        [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, const RanksPtr& ranks,
           const std::string& order, const std::string& kernel) {
            return fived::ring_attention(q, k, v, causal, ranks, parse<Order>("order", order),
                                         parse<Kernel>("kernel", kernel));
        },
        "q_BHsK"_a, "k_BGsK"_a, "v_BGsK"_a, "causal"_a, "ranks"_a.none(false), "order"_a = "contiguous",
        "kernel"_a = "library", fived::Waiting(),
        "This rank's rows of softmax(q k^T / sqrt(K)) v, over the keys of all ranks; the positions lie as "
        "places() "
        "says. order: contiguous, zigzag. kernel: library (CPUs), plain. Raises ValueError for what does not "
        "fit.");
}
