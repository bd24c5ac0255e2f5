// What the Python modules share: communicators from mpi4py, views of numpy arrays.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <span>

#include "fived/math/matrix.hpp"
#include "fived/mpi/mpi.hpp"

namespace fived {

namespace py = pybind11;

/// A numpy array taken as it is: never converted, so that results written into it reach the caller.
template <class T>
using Array = py::array_t<T, py::array::c_style>;

/// Raises ValueError when the array is read-only.
template <class T>
std::span<T> writable(Array<T>& array) {
    return {array.mutable_data(), static_cast<std::size_t>(array.size())};
}

template <class T>
std::span<const T> readable(const Array<T>& array) {
    return {array.data(), static_cast<std::size_t>(array.size())};
}

/// Raises ValueError unless the array has two dimensions.
template <class T>
MatrixView<const T> matrix(const Array<T>& array) {
    if (array.ndim() != 2)
        throw std::invalid_argument("a matrix has 2 dimensions; given " + std::to_string(array.ndim()));
    return {array.data(), std::size_t(array.shape(0)), std::size_t(array.shape(1))};
}

/// The same, to write results into.
template <class T>
MatrixView<T> writable_matrix(Array<T>& array) {
    const MatrixView<const T> shape = matrix(array);
    return {array.mutable_data(), shape.rows, shape.columns};
}

/// A duplicate of an mpi4py communicator. Collective. Raises RuntimeError when mpi4py runs on another MPI
/// library than this module was built with.
inline Communicator communicator(const py::object& comm) {
    const int handle = comm.attr("py2f")().cast<int>();
    int initialized = 0;
    MPI_Initialized(&initialized);
    if (!initialized) {
        char version[MPI_MAX_LIBRARY_VERSION_STRING] = "";
        int length = 0;
        MPI_Get_library_version(version, &length);
        throw std::runtime_error("mpi4py runs on another MPI than this module was built with: " +
                                 std::string(version, length));
    }
    const py::gil_scoped_release waiting;
    return Communicator(MPI_Comm_f2c(handle));
}

/// None for None, which stands for one rank.
inline std::optional<Communicator> communicator_or_none(const py::object& comm) {
    if (comm.is_none()) return {};
    return communicator(comm);
}

}  // namespace fived
