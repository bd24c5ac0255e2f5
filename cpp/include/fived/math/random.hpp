// Random numbers by position, not by state: the k-th number of a stream is a function of (seed, stream, k),
// so any rank can make any part alone. common/random.py makes the same numbers.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>

#include "fived/math/sha256.hpp"

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

/// Standard normal (Box and Muller, 1958): number k uses the uniform numbers 2k and 2k + 1.
inline double normal(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
    const double radius =
        std::sqrt(-2 * std::log(1 - uniform(seed, stream, 2 * index)));  // 1 - u lies in (0, 1]
    return radius * std::cos(2 * std::numbers::pi * uniform(seed, stream, 2 * index + 1));
}

/// A stream for a name: the first 8 bytes of its SHA-256, little-endian.
inline std::uint64_t stream_of(const std::string& name) {
    const auto reversed = [](std::uint32_t x) {
        return x >> 24 | (x >> 8 & 0xff00u) | (x << 8 & 0xff0000u) | x << 24;
    };
    const auto words = sha256({reinterpret_cast<const std::uint8_t*>(name.data()), name.size()}).words;
    return std::uint64_t(reversed(words[1])) << 32 | reversed(words[0]);
}

}  // namespace fived
