// What the Python modules on LibTorch share: Ranks, and a list of what was sent.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "fived/torch/ranks.hpp"

namespace fived {

namespace py = pybind11;

/// Whatever waits for other ranks, or may, lets other Python threads run.
using Waiting = py::call_guard<py::gil_scoped_release>;

/// Owner of what may hold the last reference to a process group, whose end joins a thread: one that may wait for the
/// interpreter's lock, to free a tensor that Python has seen.
template <class T>
struct Unlocked {
    void operator()(T* object) const {
        const py::gil_scoped_release waiting;
        delete object;
    }
};
template <class T>
using Owner = std::unique_ptr<T, Unlocked<T>>;

/// take_messages() for a class that has it.
template <class T, class... Options>
void add_messages(py::class_<T, Options...>& type) {
    type.def(
        "take_messages",
        [](T& self) {
            std::vector<std::tuple<std::string, std::int64_t, double>> list;
            for (const Message& m : self.take_messages()) list.emplace_back(m.op, m.n_bytes, m.seconds);
            return list;
        },
        "[(operation, bytes this rank sent times the number of ranks, seconds blocked)] since the last "
        "call.");
}

/// A torch.distributed process group, wrapped once.
inline void add_ranks(py::module_& module, const std::string& axis) {
    const std::string doc = "The ranks along " + axis + ". None: one rank.";
    py::class_<Ranks, RanksPtr> ranks(module, "Ranks", py::module_local(), doc.c_str());
    ranks.def(py::init<const Group&>(), py::arg("process_group"))
        .def_property_readonly("rank", &Ranks::rank)
        .def_property_readonly("size", &Ranks::size);
    add_messages(ranks);
}

}  // namespace fived
