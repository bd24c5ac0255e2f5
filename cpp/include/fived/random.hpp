// Random numbers by position, not by state: the k-th number of a stream is a function of (seed, stream, k),
// so any rank can make any part alone. common/random.py makes the same numbers.
#pragma once

#include <cstdint>

namespace fived {

/// The finaliser of splitmix64 (Steele, Lea and Flood, 2014).
constexpr std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

constexpr std::uint64_t random_bits(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
    constexpr std::uint64_t golden = 0x9e3779b97f4a7c15u;
    return mix(mix(seed * golden + stream + golden) + index * golden);
}

/// In [0, 1), a multiple of 2^-53.
constexpr double uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
    return static_cast<double>(random_bits(seed, stream, index) >> 11) * 0x1p-53;
}

}  // namespace fived
