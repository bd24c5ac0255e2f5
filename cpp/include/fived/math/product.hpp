// What products of cut matrices share: their sizes, and the check of a rank's pieces.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "fived/math/matrix.hpp"
#include "fived/math/partition.hpp"

namespace fived {

/// A is M x K, B is K x J, C is M x J.
struct Shape {
    std::size_t M = 0, K = 0, J = 0;

    double flop() const { return 2.0 * double(M) * double(K) * double(J); }
};

/// Throws std::invalid_argument where x is of other sizes than rows and columns. what: "block of A", say.
template <class T>
void check_piece(const std::string& what, MatrixView<const T> x, Range rows, Range columns) {
    const auto sizes = [](std::size_t m, std::size_t n) {
        return "[" + std::to_string(m) + ", " + std::to_string(n) + "]";
    };
    if (x.rows != rows.length || x.columns != columns.length)
        throw std::invalid_argument("this rank's " + what + " is " + sizes(rows.length, columns.length) +
                                    "; given is " + sizes(x.rows, x.columns));
}

}  // namespace fived
