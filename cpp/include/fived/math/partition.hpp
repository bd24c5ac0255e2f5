// The two ways in which something is cut into pieces that differ by one element at most: samples, gradients and buffers by
// `cut`, what a rank holds of a tensor, of layers or of experts by `shard_of`.
#pragma once

#include <cstddef>
#include <span>

namespace fived {

/// The first element of piece `i` when `n` elements are cut into `pieces` that differ by one at most.
constexpr std::size_t cut(std::size_t n, std::size_t pieces, std::size_t i) {
    return n / pieces * i + n % pieces * i / pieces;
}

/// Where a piece begins and how long it is; pieces differ by one at the most.
struct Range {
    std::size_t begin = 0, length = 0;

    std::size_t end() const { return begin + length; }
};

inline Range range(std::size_t n, int pieces, int i) {
    const std::size_t begin = cut(n, pieces, i);
    return {begin, cut(n, pieces, i + 1) - begin};
}

/// Shard `i` of `n` rows, columns, layers or experts; the longer ones come first. `sizes_of` in Python cuts alike, as torch's
/// own shards begin with the longest.
constexpr Range shard_of(std::size_t n, std::size_t pieces, std::size_t i) {
    const std::size_t longer = n % pieces;
    return {n / pieces * i + (i < longer ? i : longer), n / pieces + (i < longer)};
}

/// Piece `i` of `pieces` of a buffer.
template <class T>
std::span<T> piece(std::span<T> data, std::size_t pieces, std::size_t i) {
    const std::size_t begin = cut(data.size(), pieces, i);
    return data.subspan(begin, cut(data.size(), pieces, i + 1) - begin);
}

}  // namespace fived
