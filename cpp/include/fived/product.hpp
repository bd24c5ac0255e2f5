// What lessons that multiply cut matrices share: sizes, matrices made piece by piece, their difference, timing in turn.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "fived/blas.hpp"
#include "fived/matrix.hpp"
#include "fived/mpi.hpp"
#include "fived/partition.hpp"
#include "fived/random.hpp"
#include "fived/record.hpp"

namespace fived {

/// A is M x K, B is K x J, C is M x J.
struct Shape {
    std::size_t M = 0, K = 0, J = 0;

    double flop() const { return 2.0 * double(M) * double(K) * double(J); }
};

/// Where a piece begins and how long it is; pieces differ by one at the most.
struct Range {
    std::size_t begin = 0, length = 0;

    std::size_t end() const { return begin + length; }
};

inline Range range(std::size_t n, int pieces, int i) {
    const std::size_t begin = cut(n, pieces, i);
    return {begin, cut(n, pieces, i + 1) - begin};
}

/// A matrix that owns its numbers.
template <class T>
struct Matrix {
    std::vector<T> numbers;
    MatrixView<T> view;

    Matrix(std::size_t rows, std::size_t columns)
        : numbers(rows * columns), view(numbers.data(), rows, columns) {}
    Matrix(Matrix&&) = default;  // the vector keeps its memory
    /// Rows and columns of a whole matrix of numbers by position, uniform in [-1, 1).
    Matrix(Range rows, Range columns, std::size_t whole_columns, std::uint64_t seed)
        : Matrix(rows.length, columns.length) {
        for (std::size_t i = 0; i < rows.length; ++i)
            for (std::size_t j = 0; j < columns.length; ++j)
                view(i, j) =
                    T(2 * uniform(seed, 0, (rows.begin + i) * whole_columns + columns.begin + j) - 1);
    }
    operator MatrixView<const T>() const { return view; }
    operator Factor<T>() const { return MatrixView<const T>(view); }
};

/// max |x - y| / max |x| over this rank's piece x = whole[rows, columns].
template <class T>
double difference(const Matrix<T>& whole, Range rows, Range columns, MatrixView<const T> y) {
    double size = 0, apart = 0;
    for (std::size_t i = 0; i < rows.length; ++i)
        for (std::size_t j = 0; j < columns.length; ++j) {
            const double x = double(whole.view(rows.begin + i, columns.begin + j));
            size = std::max(size, std::abs(x));
            apart = std::isfinite(double(y(i, j))) ? std::max(apart, std::abs(x - double(y(i, j))))
                                                   : std::numeric_limits<double>::infinity();
        }
    return apart == 0 ? 0 : apart / size;
}

/// Seconds of each round.
struct Timed {
    std::string name;
    std::vector<double> seconds;
    std::size_t counted = 0, formula = 0;  // bytes
};
using Cases = std::vector<std::pair<std::string, std::function<void()>>>;

/// Seconds of the slowest rank in each round; all cases in turn, after a round that does not count. Collective.
inline std::vector<Timed> in_turn(const Communicator& world, const Cases& cases, int rounds) {
    std::vector<Timed> timed;
    for (const auto& [name, call] : cases) timed.push_back({name, {}});
    for (int round = -1; round < rounds; ++round)
        for (std::size_t i = 0; i < cases.size(); ++i) {
            world.barrier();
            const Timer timer;
            cases[i].second();
            const double seconds = world.all_reduce(timer.seconds(), MPI_MAX);
            if (round >= 0) timed[i].seconds.push_back(seconds);
        }
    return timed;
}

/// Median over the rounds of a / b.
inline double ratio(const std::vector<double>& a, const std::vector<double>& b) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < a.size(); ++i) ratios.push_back(a[i] / b[i]);
    return median(ratios);
}

}  // namespace fived
