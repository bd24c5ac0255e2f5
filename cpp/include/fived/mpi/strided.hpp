// A piece of a message that lies in memory with gaps, such as some columns of a matrix.
//
//     rows 2 to 4, columns 1 and 2 of 8-byte numbers         . . . . .
//                                                            . a b . .        run = 16 bytes
//     the message: a b c d e f                               . c d . .        outer = {3 runs, a row apart}
//                                                            . e f . .
//
// Collectives copy it run by run between its place and the memory that ranks share. Without this, a rank would first
// collect the piece in memory of its own, and the receiver would spread it again: two copies more.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <vector>

namespace fived {

/// Runs of bytes in row-major order of the outer dimensions.
template <class Byte>
struct Strided {
    struct Dim {
        std::size_t count;
        std::ptrdiff_t apart;  // bytes
    };
    static constexpr std::size_t most_dims = 8;

    Byte* start = nullptr;
    std::size_t run = 0;  // bytes
    std::vector<Dim> outer = {};

    Strided() = default;
    Strided(std::span<Byte> whole) : start(whole.data()), run(whole.size()) {}
    Strided(Byte* start, std::size_t run, std::vector<Dim> outer)
        : start(start), run(run), outer(std::move(outer)) {
        if (this->outer.size() > most_dims) throw std::invalid_argument("too many dimensions");
    }

    std::size_t size() const {
        std::size_t bytes = run;
        for (const Dim& dim : outer) bytes *= dim.count;
        return bytes;
    }
    /// Throws std::logic_error where there are gaps.
    std::span<Byte> whole() const {
        if (!outer.empty()) throw std::logic_error("a message with gaps");
        return {start, run};
    }
    /// Calls use(place, at, n) for the n bytes at `place` of each run that lies in [begin, begin + bytes) of the message;
    /// `at` is counted from `begin`.
    template <class Use>
    void each(std::size_t begin, std::size_t bytes, Use use) const {
        if (bytes == 0) return;
        std::size_t line = begin / run, skip = begin % run, at = 0;
        std::array<std::size_t, most_dims> index{};
        Byte* place = start;
        for (std::size_t d = outer.size(); d-- > 0; line /= outer[d].count) {
            index[d] = line % outer[d].count;
            place += std::ptrdiff_t(index[d]) * outer[d].apart;
        }
        for (;;) {
            const std::size_t n = std::min(run - skip, bytes - at);
            use(place + skip, at, n);
            at += n;
            if (at == bytes) return;
            skip = 0;
            for (std::size_t d = outer.size(); d-- > 0;) {
                place += outer[d].apart;
                if (++index[d] < outer[d].count) break;
                place -= std::ptrdiff_t(outer[d].count) * outer[d].apart;
                index[d] = 0;
            }
        }
    }
};

}  // namespace fived
