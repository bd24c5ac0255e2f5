// Python module dp_libtorch: DataParallel and Zero1 on any module's parameters and a torch.distributed process group.
#include <memory>
#include <optional>

#include "dp_libtorch.hpp"
#include "fived/torch/python.hpp"
#include "zero1.hpp"

namespace {

namespace py = pybind11;
using fived::DataParallel, fived::Zero1, fived::Waiting;
using namespace py::literals;

/// `with dp.no_sync():`
struct NoSync {
    bool& synchronising;
    std::optional<fived::NoSync> active;
};

/// What both have.
template <class T>
py::class_<T, fived::Owner<T>> add(py::module_& module, const char* name, const char* doc) {
    py::class_<T, fived::Owner<T>> type(module, name, doc);
    fived::add_messages(type);
    type.def(py::init<const fived::Tensors&, const fived::Group&, std::size_t>(), "tensors"_a,
             "process_group"_a, "bucket_bytes"_a = std::size_t{8} << 20, Waiting())
        .def(
            "no_sync", [](T& self) { return std::make_unique<NoSync>(self.synchronising(), std::nullopt); },
            py::keep_alive<0, 1>(), "Context in which backward passes only accumulate.")
        .def_property_readonly("buckets", &T::buckets, "Number of buckets.");
    return type;
}

}  // namespace

PYBIND11_MODULE(dp_libtorch, module) {
    module.doc() =
        "Data parallelism and ZeRO-1 in C++ on LibTorch's autograd and c10d: buckets of gradients, "
        "overlapped.";
    py::class_<NoSync>(module, "NoSync")
        .def("__enter__", [](NoSync& self) { self.active.emplace(self.synchronising); })
        .def("__exit__", [](NoSync& self, const py::args&) { self.active.reset(); });
    add<DataParallel>(
        module, "DataParallel",
        "Sums gradients over a process group (None: one rank). Tensors without requires_grad are only "
        "broadcast. Raises ValueError for what it cannot sum.")
        .def("finish", &DataParallel::finish, Waiting(),
             "Sends what is left, waits; then p.grad is the sum over ranks, or None where no rank has one. A "
             "second backward before it raises RuntimeError.");
    add<Zero1>(
        module, "Zero1",
        "Data parallelism in which each rank's optimizer steps on 1/n of the weights: on pieces(). Raises "
        "ValueError as DataParallel does.")
        .def("finish", &Zero1::finish, Waiting(),
             "Sends what is left, waits; then the pieces' grad is the sum over ranks, or None where no rank "
             "has one; "
             "the parameters have none. A second backward before it raises RuntimeError.")
        .def("gather", &Zero1::gather, Waiting(), "After the optimizer's step: all ranks get all weights.")
        .def("gradient_norm", &Zero1::gradient_norm, Waiting(), "The norm of all gradients, after finish().")
        .def("pieces", &Zero1::pieces,
             "This rank's piece of each tensor that requires a gradient, flat; many are empty.")
        .def("sizes", &Zero1::sizes, "How many numbers of each such tensor every rank owns: [tensor][rank].");
}
