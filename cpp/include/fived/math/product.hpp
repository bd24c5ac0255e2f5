// What products of cut matrices share: their sizes.
#pragma once

#include <cstddef>

#include "fived/math/partition.hpp"

namespace fived {

/// A is M x K, B is K x J, C is M x J.
struct Shape {
    std::size_t M = 0, K = 0, J = 0;

    double flop() const { return 2.0 * double(M) * double(K) * double(J); }
};

}  // namespace fived
