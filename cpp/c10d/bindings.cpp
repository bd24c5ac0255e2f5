#include <pybind11/chrono.h>
#include <torch/extension.h>

#include "backend.hpp"

namespace py = pybind11;
using fived::MpiBackend;

PYBIND11_MODULE(fived_c10d, module) {
    using namespace py::literals;
    module.doc() = "torch.distributed on MPI; common/mpi_backend.py registers it.";
    py::module_::import("torch._C._distributed_c10d");
    py::class_<MpiBackend, c10d::Backend, c10::intrusive_ptr<MpiBackend>>(
        module, "MpiBackend", "A process group of ranks that one mpirun started on one host.")
        .def(py::init<int, int, const std::string&, std::vector<int>, std::chrono::milliseconds>(), "rank"_a,
             "size"_a, "name"_a, "ranks"_a, "timeout"_a, py::call_guard<py::gil_scoped_release>());
}
