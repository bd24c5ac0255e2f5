#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.hpp"

namespace py = pybind11;
using fived::GroupOptions;
using fived::MpiBackend;

PYBIND11_MODULE(fived_c10d, module) {
    using namespace py::literals;
    module.doc() = "torch.distributed on MPI; common/launch/mpi_backend.py registers it.";
    py::module_::import("torch._C._distributed_c10d");
    py::class_<GroupOptions, c10d::Backend::Options, c10::intrusive_ptr<GroupOptions>>(module, "GroupOptions")
        .def(py::init<std::chrono::milliseconds>(), "timeout"_a)
        .def_readwrite("ranks_per_host", &GroupOptions::ranks_per_host)
        .def_readwrite("largest_message", &GroupOptions::largest_message)
        .def_readwrite("staged", &GroupOptions::staged);
    py::class_<MpiBackend, c10d::Backend, c10::intrusive_ptr<MpiBackend>>(
        module, "MpiBackend", "A process group of ranks that one mpirun started.")
        .def(py::init<int, int, const std::string&, std::vector<int>, c10::intrusive_ptr<GroupOptions>>(),
             "rank"_a, "size"_a, "name"_a, "ranks"_a, "options"_a, py::call_guard<py::gil_scoped_release>());
}
