// SHA-256 (FIPS 180-4), for streams of random numbers by name and for the identity of a text.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>

namespace fived {

struct Sha256 {
    std::array<std::uint32_t, 8> words;

    std::string hex() const {
        std::string text(64, ' ');
        for (std::size_t i = 0; i < 8; ++i) std::snprintf(text.data() + 8 * i, 9, "%08x", words[i]);
        return text;
    }
};

namespace detail {

/// The first 32 bits behind the point of square and cube roots of the first primes.
struct Sha256Constants {
    std::array<std::uint32_t, 64> rounds;
    Sha256 start;

    Sha256Constants() {
        const auto fraction = [](double x) { return std::uint32_t((x - std::floor(x)) * 0x1p32); };
        for (std::uint32_t prime = 2, found = 0; found < 64; ++prime) {
            bool is_prime = true;
            for (std::uint32_t d = 2; d < prime; ++d) is_prime &= prime % d != 0;
            if (!is_prime) continue;
            if (found < 8) start.words[found] = fraction(std::sqrt(double(prime)));
            rounds[found++] = fraction(std::cbrt(double(prime)));
        }
    }
};

inline const Sha256Constants sha256_constants;

inline void add_block(Sha256& sum, const std::uint8_t* block) {
    std::array<std::uint32_t, 64> w{};
    for (std::size_t i = 0; i < 64; ++i) w[i / 4] |= std::uint32_t(block[i]) << (24 - i % 4 * 8);
    for (std::size_t i = 16; i < 64; ++i) {
        const std::uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + w[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) +
               (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = sum.words;
    for (std::size_t i = 0; i < 64; ++i) {
        const std::uint32_t one = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                                  ((e & f) ^ (~e & g)) + sha256_constants.rounds[i] + w[i];
        const std::uint32_t two =
            (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
    }
    const std::array added{a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) sum.words[i] += added[i];
}

}  // namespace detail

inline Sha256 sha256(std::span<const std::uint8_t> data) {
    Sha256 sum = detail::sha256_constants.start;
    const std::size_t whole = data.size() / 64 * 64;
    for (std::size_t i = 0; i < whole; i += 64) detail::add_block(sum, data.data() + i);
    // The last bytes, a bit 1, zeros, and the number of bits fill one block or two.
    std::string end(data.begin() + std::ptrdiff_t(whole), data.end());
    end += '\x80';
    end.resize(end.size() <= 56 ? 56 : 120);
    for (int i = 8; i-- > 0;) end += char(data.size() * 8 >> 8 * i);
    for (std::size_t i = 0; i < end.size(); i += 64)
        detail::add_block(sum, reinterpret_cast<const std::uint8_t*>(end.data()) + i);
    return sum;
}

}  // namespace fived
