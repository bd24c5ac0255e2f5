// Python module dp_libtorch: DataParallel on any module's parameters and a torch.distributed process group.
#include <torch/extension.h>

#include <memory>
#include <optional>

#include "dp_libtorch.hpp"

namespace {

namespace py = pybind11;
using fived::DataParallel;

/// `with dp.no_sync():`
struct NoSync {
    DataParallel& dp;
    std::optional<DataParallel::NoSync> active;
};

}  // namespace

PYBIND11_MODULE(dp_libtorch, module) {
    using namespace py::literals;
    // Whatever waits for other ranks, or may, lets other Python threads run.
    using Waiting = py::call_guard<py::gil_scoped_release>;
    module.doc() =
        "Data parallelism in C++ on LibTorch's autograd and c10d: buckets of gradients, overlapped.";
    py::class_<NoSync>(module, "NoSync")
        .def("__enter__", [](NoSync& self) { self.active.emplace(self.dp); })
        .def("__exit__", [](NoSync& self, const py::args&) { self.active.reset(); });
    py::class_<DataParallel>(module, "DataParallel",
                             "Sums gradients over a process group (None: one rank). Tensors without "
                             "requires_grad are only broadcast. Raises ValueError for what it cannot sum.")
        .def(py::init<const std::vector<at::Tensor>&, const DataParallel::Group&, std::size_t>(), "tensors"_a,
             "process_group"_a, "bucket_bytes"_a = std::size_t{8} << 20, Waiting())
        .def(
            "no_sync", [](DataParallel& dp) { return std::make_unique<NoSync>(dp, std::nullopt); },
            py::keep_alive<0, 1>(), "Context in which backward passes only accumulate.")
        .def("finish", &DataParallel::finish, Waiting(),
             "Sends what is left, waits; then p.grad is the sum over ranks, or None where no rank has one. A "
             "second backward before it raises RuntimeError.")
        .def_property_readonly("buckets", &DataParallel::buckets, "Number of buckets.")
        .def(
            "take_messages",
            [](DataParallel& dp) {
                std::vector<std::tuple<std::string, std::int64_t, double>> list;
                for (const fived::Message& m : dp.take_messages())
                    list.emplace_back(m.op, m.n_bytes, m.seconds);
                return list;
            },
            "[(operation, bytes this rank sent times the number of ranks, seconds blocked)] since the last "
            "call.");
}
