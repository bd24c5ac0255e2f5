// A piece of a message that lies in memory with gaps, such as some columns of a matrix.
//
//     rows 2 to 4, columns 1 and 2 of 8-byte numbers         . . . . .
//                                                            . a b . .        run = 16 bytes
//     the message: a b c d e f                               . c d . .        outer = {3 runs, a row apart}
//                                                            . e f . .
//
// Collectives copy it run by run between its place and the memory that ranks share. Without this, a rank would first
// collect the piece in memory of its own, and the receiver would spread it again: two copies more.
//
// A sender may transpose: where runs are single numbers, and the message takes them column by column, it copies blocks.
//
//     the same piece, crosswise: a c e b d f                 run = 8
//                                                            outer = {2 columns, 8 bytes apart}, {3 rows, a row apart}
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
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
    /// The bytes from `start` to the end of the last run, gaps included.
    std::size_t reach() const {
        std::size_t bytes = size() ? run : 0;
        for (const Dim& dim : outer)
            if (bytes) bytes += (dim.count - 1) * dim.apart;
        return bytes;
    }
    /// The bytes of a column, if the last dimension is one.
    std::size_t column() const { return run * outer.back().count; }
    /// Whether the last two dimensions are columns of a matrix that is stored by rows, of whole lines of the cache.
    bool crosswise() const {
        const std::size_t n = outer.size();
        return n >= 2 && (run == 4 || run == 8 || run == 16) && outer[n - 2].apart == std::ptrdiff_t(run) &&
               column() % 64 == 0 && column() <= 1024;
    }

    /// Copies [begin, begin + bytes) of the message to `to`: whole columns in blocks, through the cache; the rest by
    /// copy(to, from, n) for each run.
    template <class Copy>
    void gather(std::size_t begin, std::size_t bytes, std::byte* to, Copy copy) const {
        const auto by_runs = [&](std::size_t first, std::size_t last) {
            each(first, last - first, [&](const std::byte* from, std::size_t at, std::size_t n) {
                copy(to + (first - begin) + at, from, n);
            });
        };
        const std::size_t end = begin + bytes;
        if (!crosswise()) return by_runs(begin, end);
        const std::size_t wide = outer[outer.size() - 2].count, tall = outer.back().count;
        std::size_t c = (begin + column() - 1) / column();
        const std::size_t stop = end / column();
        if (c >= stop) return by_runs(begin, end);
        by_runs(begin, c * column());
        const auto transpose = run == 4 ? transposed<4> : run == 8 ? transposed<8> : transposed<16>;
        while (c < stop) {
            const std::size_t n = std::min(wide - c % wide, stop - c);
            transpose(to + (c * column() - begin), place_of(c * tall), outer.back().apart, n, tall);
            c += n;
        }
        by_runs(stop * column(), end);
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
        std::size_t skip = begin % run, at = 0;
        std::array<std::size_t, most_dims> index{};
        Byte* place = place_of(begin / run, index);
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

  private:
    Byte* place_of(std::size_t line) const {
        std::array<std::size_t, most_dims> index;
        return place_of(line, index);
    }
    /// Where run `line` begins, and its index in each outer dimension.
    Byte* place_of(std::size_t line, std::array<std::size_t, most_dims>& index) const {
        Byte* place = start;
        for (std::size_t d = outer.size(); d-- > 0; line /= outer[d].count) {
            index[d] = line % outer[d].count;
            place += std::ptrdiff_t(index[d]) * outer[d].apart;
        }
        return place;
    }
    /// to[c][t] = from[t][c], numbers of `bytes`; of so many rows at once as make a line of the cache in each column.
    template <std::size_t bytes>
    static void transposed(std::byte* to, const std::byte* from, std::ptrdiff_t apart, std::size_t wide,
                           std::size_t tall) {
        constexpr std::size_t rows = 64 / bytes;
        for (std::size_t first = 0; first < tall; first += rows, from += std::ptrdiff_t(rows) * apart)
            for (std::size_t c = 0; c < wide; ++c)
                for (std::size_t t = 0; t < rows; ++t)
                    std::memcpy(to + (c * tall + first + t) * bytes,
                                from + std::ptrdiff_t(t) * apart + c * bytes, bytes);
    }
};

}  // namespace fived
