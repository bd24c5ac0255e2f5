// What products of cut matrices share: their sizes and where a piece begins.
#pragma once

#include <cstddef>

#include "fived/partition.hpp"

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

}  // namespace fived
