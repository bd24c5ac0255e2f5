// Random numbers by position, not by state: the k-th number of a stream is a function of (seed, stream, k),
// so any rank can make any part alone. common/random.py makes the same numbers.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <stdexcept>
#include <string>

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

/// A stream for a name of at most 55 bytes: the first 8 bytes of its SHA-256 (FIPS 180-4), little-endian. Throws
/// std::invalid_argument for a longer one, which would not fit one block.
inline std::uint64_t stream_of(const std::string& name) {
    if (name.size() > 55) throw std::invalid_argument("a name of more than 55 bytes: " + name);
    // The constants are the first 32 bits behind the point of square and cube roots of the first primes.
    const auto fraction = [](double x) { return std::uint32_t((x - std::floor(x)) * 0x1p32); };
    std::array<std::uint32_t, 64> constants, w{};
    std::array<std::uint32_t, 8> start;
    for (std::uint32_t prime = 2, found = 0; found < 64; ++prime) {
        bool is_prime = true;
        for (std::uint32_t d = 2; d < prime; ++d) is_prime &= prime % d != 0;
        if (!is_prime) continue;
        if (found < 8) start[found] = fraction(std::sqrt(double(prime)));
        constants[found++] = fraction(std::cbrt(double(prime)));
    }
    const std::string padded = name + '\x80';
    for (std::size_t i = 0; i < padded.size(); ++i)
        w[i / 4] |= std::uint32_t(static_cast<unsigned char>(padded[i])) << (24 - i % 4 * 8);
    w[15] = std::uint32_t(name.size() * 8);
    for (int i = 16; i < 64; ++i) {
        const std::uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + w[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) +
               (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = start;
    for (int i = 0; i < 64; ++i) {
        const std::uint32_t one = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                                  ((e & f) ^ (~e & g)) + constants[i] + w[i];
        const std::uint32_t two =
            (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
    }
    const auto reversed = [](std::uint32_t x) {
        return x >> 24 | (x >> 8 & 0xff00u) | (x << 8 & 0xff0000u) | x << 24;
    };
    return std::uint64_t(reversed(start[1] + b)) << 32 | reversed(start[0] + a);
}

}  // namespace fived
