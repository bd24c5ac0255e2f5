// Is the parallel run equal to the serial one? The largest difference, by the name of the tensor it is in.
#pragma once

#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "fived/mlp.hpp"
#include "fived/mpi.hpp"

namespace fived {

struct Difference {
    double value = 0;
    std::string name;
    /// Keeps the larger one.
    void include(const Difference& other) {
        if (!(other.value <= value)) *this = other;
    }
};

/// |a - b| / |a|; infinite when anything is not a number.
inline double relative_difference(double a, double b) {
    if (!std::isfinite(a) || !std::isfinite(b)) return std::numeric_limits<double>::infinity();
    return a == b ? 0 : std::abs(a - b) / std::abs(a);
}

/// The largest of all ranks. Collective.
inline Difference largest_difference(const Communicator& comm, double a, double b) {
    return {comm.all_reduce(relative_difference(a, b), MPI_MAX), ""};
}

/// For each parameter max |a - b| / max |a|, over all ranks of `comm` (every rank brings its own a and b);
/// returns the largest with its name. Collective.
template <class T>
Difference largest_difference(const Communicator& comm, std::span<const Parameter> parameters,
                              std::span<const T> a, std::span<const T> b) {
    std::vector<double> values;
    for (const Parameter& p : parameters) {
        double size = 0, apart = 0;
        for (std::size_t i = p.offset; i < p.offset + p.size(); ++i) {
            size = std::max(size, std::abs(double(a[i])));
            apart = std::isfinite(a[i]) && std::isfinite(b[i])
                        ? std::max(apart, std::abs(double(a[i]) - double(b[i])))
                        : std::numeric_limits<double>::infinity();
        }
        values.push_back(relative_difference(size, size + apart));
    }
    comm.all_reduce(std::span(values), MPI_MAX);
    Difference largest;
    for (std::size_t p = 0; p < values.size(); ++p) largest.include({values[p], parameters[p].name});
    return largest;
}

}  // namespace fived
