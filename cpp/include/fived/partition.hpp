// The one way in which samples, gradients and buffers are cut: pieces that differ by one element at most.
#pragma once

#include <cstddef>
#include <span>

namespace fived {

/// The first element of piece `i` when `n` elements are cut into `pieces` that differ by one at most.
constexpr std::size_t cut(std::size_t n, std::size_t pieces, std::size_t i) {
    return n / pieces * i + n % pieces * i / pieces;
}

/// Piece `i` of `pieces` of a buffer.
template <class T>
std::span<T> piece(std::span<T> data, std::size_t pieces, std::size_t i) {
    const std::size_t begin = cut(data.size(), pieces, i);
    return data.subspan(begin, cut(data.size(), pieces, i + 1) - begin);
}

}  // namespace fived
