// What the tests of shared memory and of several hosts send: numbers that say whose they are, and their sum.
#pragma once

#include <sys/statvfs.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "fived/mpi/mpi.hpp"

using Numbers = std::vector<std::int32_t>;

inline Numbers numbers(std::size_t n, int rank, int to = 0) {
    Numbers values(n);
    for (std::size_t i = 0; i < n; ++i) values[i] = int((i * 7 + rank * 13 + to * 5) % 97);
    return values;
}

/// The sum over ranks of numbers(n, rank, to).
inline Numbers total(const fived::Communicator& world, std::size_t n, int to = 0) {
    Numbers result(n);
    for (int r = 0; r < world.size(); ++r) {
        const Numbers term = numbers(n, r, to);
        std::ranges::transform(result, term, result.begin(), std::plus());
    }
    return result;
}

inline std::byte* bytes(Numbers& x) {
    return reinterpret_cast<std::byte*>(x.data());
}

inline void sum(std::byte* out, const std::byte* const* in, int inputs, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        std::int32_t total = 0;
        for (int r = 0; r < inputs; ++r) total += reinterpret_cast<const std::int32_t*>(in[r])[i];
        reinterpret_cast<std::int32_t*>(out)[i] = total;
    }
}

/// Whether arenas have room on this machine; containers often give /dev/shm 64 MB.
inline bool has_room_for_arenas() {
    struct statvfs system = {};
    return statvfs("/dev/shm", &system) == 0 && system.f_bavail > (std::uint64_t(1) << 30) / system.f_frsize;
}
