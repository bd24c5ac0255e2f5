// Copies between the memory of a rank and the memory that it shares, through the cache or past it.
//
// A store through the cache first loads the line that it writes, and pushes out what is still needed. A store past it does
// neither, but is seen later: call arrive() before others read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "fived/mpi/strided.hpp"

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace fived {

inline void copy_through_cache(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (bytes) std::memcpy(to, from, bytes);  // there may be no memory behind nothing
}

#ifdef __SSE2__
/// Copies whole lines of the cache past it, a line of each run in turn, to places that begin with a line.
using CopyLines = void(std::byte* const* to, const std::byte* const* from, std::size_t bytes);

/// Places of some runs, and the order of their lines. Local to a kernel, so that none of its stores can change them.
///
/// A load waits for an earlier store if their addresses agree in the last 12 bits (4K aliasing). So a kernel loads a line of
/// every run before it stores any, and goes up or down so that a load comes to such an address 2048 bytes after the store
/// or later; going up from 64 bytes below the places took seven times as long on an AMD EPYC (Zen 3).
template <int count>
struct Runs {
    Runs(std::byte* const* places, const std::byte* const* sources, std::size_t bytes) {
        std::copy_n(places, count, to);
        std::copy_n(sources, count, from);
        const auto apart =
            reinterpret_cast<std::uintptr_t>(from[0]) - reinterpret_cast<std::uintptr_t>(to[0]);
        if (apart % 4096 > 2048) first = std::ptrdiff_t(bytes) - 64, step = -64;
    }
    std::byte* to[count];
    const std::byte* from[count];
    std::ptrdiff_t first = 0, step = 64;
};

/// Copies each line by four stores.
template <int count>
void copy_lines(std::byte* const* to, const std::byte* const* from, std::size_t bytes) {
    const Runs<count> runs(to, from, bytes);
    std::ptrdiff_t i = runs.first;
    for (std::size_t lines = bytes / 64; lines > 0; --lines, i += runs.step) {
        __m128i x[count][4];
        for (int r = 0; r < count; ++r)
            for (int j = 0; j < 4; ++j)
                x[r][j] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(runs.from[r] + i) + j);
        for (int r = 0; r < count; ++r)
            for (int j = 0; j < 4; ++j)
                _mm_stream_si128(reinterpret_cast<__m128i*>(runs.to[r] + i) + j, x[r][j]);
    }
}
/// Copies each line by two stores.
template <int count>
__attribute__((target("avx2"))) void copy_lines_by_halves(std::byte* const* to, const std::byte* const* from,
                                                          std::size_t bytes) {
    const Runs<count> runs(to, from, bytes);
    std::ptrdiff_t i = runs.first;
    for (std::size_t lines = bytes / 64; lines > 0; --lines, i += runs.step) {
        __m256i x[count][2];
        for (int r = 0; r < count; ++r)
            for (int j = 0; j < 2; ++j)
                x[r][j] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(runs.from[r] + i) + j);
        for (int r = 0; r < count; ++r)
            for (int j = 0; j < 2; ++j)
                _mm256_stream_si256(reinterpret_cast<__m256i*>(runs.to[r] + i) + j, x[r][j]);
    }
}
/// Copies each line by one store.
template <int count>
__attribute__((target("avx512f"))) void copy_lines_at_once(std::byte* const* to, const std::byte* const* from,
                                                           std::size_t bytes) {
    const Runs<count> runs(to, from, bytes);
    std::ptrdiff_t i = runs.first;
    for (std::size_t lines = bytes / 64; lines > 0; --lines, i += runs.step) {
        __m512i x[count];
        for (int r = 0; r < count; ++r) x[r] = _mm512_loadu_si512(runs.from[r] + i);
        for (int r = 0; r < count; ++r) _mm512_stream_si512(reinterpret_cast<__m512i*>(runs.to[r] + i), x[r]);
    }
}

/// Copies whole lines of the runs by the widest stores of the processor.
inline void copy_lines_of_runs(std::byte* const* to, const std::byte* const* from, int count,
                               std::size_t bytes) {
    struct Kernel {
        int together;
        CopyLines *copy, *copy_one;
    };
    // Eight runs at a time by stores of a whole line; two by shorter ones, of which more are no faster.
    static const Kernel best =
        __builtin_cpu_supports("avx512f") ? Kernel{8, copy_lines_at_once<8>, copy_lines_at_once<1>}
        : __builtin_cpu_supports("avx2")  ? Kernel{2, copy_lines_by_halves<2>, copy_lines_by_halves<1>}
                                          : Kernel{2, copy_lines<2>, copy_lines<1>};
    int r = 0;
    for (; r + best.together <= count; r += best.together) best.copy(to + r, from + r, bytes);
    for (; r < count; ++r) best.copy_one(to + r, from + r, bytes);
}
#endif

/// Copies past the cache, two or eight runs of equal length in turn: a core fetches ahead in each, so more lines are under
/// way than of one.
class RunsPastCache {
  public:
    ~RunsPastCache() { copy(); }
    void add(std::byte* to, const std::byte* from, std::size_t bytes) {
        if (bytes != bytes_) copy();
        to_[count_] = to, from_[count_] = from, bytes_ = bytes;
        if (++count_ == most) copy();
    }
    void copy() {
#ifdef __SSE2__
        // Whole lines only: a part of one would be written to memory when the next line begins.
        std::size_t heads[most] = {}, longest = 0;
        for (int r = 0; r < count_; ++r) {
            heads[r] = std::min(bytes_, std::size_t(-reinterpret_cast<std::uintptr_t>(to_[r])) & 63);
            longest = std::max(longest, heads[r]);
        }
        const std::size_t lines = (bytes_ - longest) / 64 * 64;
        for (int r = 0; r < count_; ++r) {
            const std::size_t tail = heads[r] + lines;
            copy_through_cache(to_[r], from_[r], heads[r]);
            copy_through_cache(to_[r] + tail, from_[r] + tail, bytes_ - tail);
            to_[r] += heads[r], from_[r] += heads[r];
        }
        copy_lines_of_runs(to_, from_, count_, lines);
#else
        for (int r = 0; r < count_; ++r) copy_through_cache(to_[r], from_[r], bytes_);
#endif
        count_ = 0;
    }

  private:
    static constexpr int most = 8;
    std::byte* to_[most];
    const std::byte* from_[most];
    std::size_t bytes_ = 0;
    int count_ = 0;
};

inline void copy_past_cache(std::byte* to, const std::byte* from, std::size_t bytes) {
    RunsPastCache().add(to, from, bytes);
}

/// Orders what was copied past the cache before all later stores.
inline void arrive() {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

/// Copies [begin, begin + bytes) of the message `from` to the same part of `to`. `runs` may keep some for its next copy.
inline void copy_message(const Strided<std::byte>& to, const Strided<const std::byte>& from,
                         std::size_t begin, std::size_t bytes, RunsPastCache& runs) {
    if (!from.crosswise())
        return to.each(begin, bytes, [&](std::byte* place, std::size_t at, std::size_t n) {
            from.each(begin + at, n, [&](const std::byte* source, std::size_t more, std::size_t k) {
                runs.add(place + more, source, k);
            });
        });
    alignas(64) std::byte block[1 << 14];  // stays in the nearest cache
    for (std::size_t at = 0; at < bytes; at += sizeof block) {
        const std::size_t n = std::min(sizeof block, bytes - at);
        from.gather(begin + at, n, block, copy_through_cache);
        to.each(begin + at, n,
                [&](std::byte* place, std::size_t more, std::size_t k) { runs.add(place, block + more, k); });
        runs.copy();
    }
}

}  // namespace fived
