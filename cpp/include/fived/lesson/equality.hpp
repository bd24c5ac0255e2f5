// Is the parallel run equal to the serial one? The largest difference, by the name of the tensor it is in.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "fived/math/mlp.hpp"
#include "fived/mpi/mpi.hpp"

namespace fived {

struct Difference {
    double value = 0;
    std::string name;
    /// Keeps the larger one.
    void include(const Difference& other) {
        if (!(other.value <= value)) *this = other;
    }
};

/// |a - b|; infinite when either is not a number.
inline double distance(double a, double b) {
    return std::isfinite(a) && std::isfinite(b) ? std::abs(a - b) : std::numeric_limits<double>::infinity();
}

/// A tensor of the serial run, or the part of it that this rank has.
struct Compared {
    std::string name;
    double size = 0;   // max |a|
    double apart = 0;  // max |a - b|
    double unit = 0;   // where it is asked for: what one unit in the last place of the weights moves

    void include(double a, double b) {
        if (std::isfinite(a)) size = std::max(size, std::abs(a));
        apart = std::max(apart, distance(a, b));
    }
};

/// What a tensor is measured by is at least this share of M, the largest number of all that are compared with it. See
/// common/lesson/equality.py for the reason.
inline double share_of_largest(double epsilon, double tolerance) {
    return 4 * epsilon / tolerance;
}
template <class T>
double share_of_largest(double tolerance) {
    return share_of_largest(double(std::numeric_limits<T>::epsilon()), tolerance);
}

/// max |a - b| / max(max |a|, share M), the largest with its name; infinite where |a - b| is, and for a difference from
/// numbers that are all zero. All ranks bring the same names. Collective.
inline Difference largest_difference(const Communicator& comm, const std::vector<Compared>& list,
                                     double share) {
    std::vector<double> sizes, values;
    for (const Compared& c : list) sizes.push_back(c.size), values.push_back(c.apart);
    comm.all_reduce(std::span(sizes), MPI_MAX);
    comm.all_reduce(std::span(values), MPI_MAX);
    const double model = share > 0 && !list.empty() ? share * *std::ranges::max_element(sizes) : 0;
    Difference largest;
    for (std::size_t i = 0; i < list.size(); ++i)
        if (values[i] > 0) {
            const double scale = std::isfinite(values[i]) ? std::max(sizes[i], model) : 1;
            largest.include({values[i] / scale, list[i].name});
        }
    return largest;
}
/// Of two numbers. Collective.
inline Difference largest_difference(const Communicator& comm, double a, double b) {
    std::vector<Compared> one(1);
    one[0].include(a, b);
    return largest_difference(comm, one, 0);
}
/// Of the parameters in flat arrays. Collective.
template <class T>
Difference largest_difference(const Communicator& comm, std::span<const Parameter> parameters,
                              std::span<const T> a, std::span<const T> b, double tolerance) {
    std::vector<Compared> list;
    for (const Parameter& p : parameters) {
        Compared& compared = list.emplace_back(Compared{p.name});
        for (std::size_t i = p.offset; i < p.offset + p.size(); ++i)
            compared.include(double(a[i]), double(b[i]));
    }
    return largest_difference(comm, list, share_of_largest<T>(tolerance));
}

/// max |a - b| / unit, the unit at least one rounding of the tensor's largest number. Collective.
inline Difference largest_in_ulps(const Communicator& comm, std::vector<Compared> list, double epsilon) {
    for (Compared& c : list) c.size = c.size > 0 ? std::max(c.unit, epsilon * c.size) : INFINITY;
    return largest_difference(comm, list, 0);
}

}  // namespace fived
