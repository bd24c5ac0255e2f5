// A matrix that owns nothing: a pointer, two lengths, and the distance between rows.
#pragma once

#include <cstddef>
#include <span>
#include <type_traits>

namespace fived {

/// Row-major view of rows x columns elements; row i starts at data + i * stride.
template <class T>
struct MatrixView {
    T* data = nullptr;
    std::size_t rows = 0, columns = 0, stride = 0;

    MatrixView() = default;
    MatrixView(T* data, std::size_t rows, std::size_t columns) : MatrixView(data, rows, columns, columns) {}
    MatrixView(T* data, std::size_t rows, std::size_t columns, std::size_t stride)
        : data(data), rows(rows), columns(columns), stride(stride) {}
    /// A view that may write is also one that may read.
    operator MatrixView<const T>() const
        requires(!std::is_const_v<T>)
    {
        return {data, rows, columns, stride};
    }

    T& operator()(std::size_t i, std::size_t j) const { return data[i * stride + j]; }
    std::span<T> row(std::size_t i) const { return {data + i * stride, columns}; }
    /// `n` rows from row `begin` on.
    MatrixView row_block(std::size_t begin, std::size_t n) const {
        return {data + begin * stride, n, columns, stride};
    }
    /// `n` columns from column `begin` on.
    MatrixView column_block(std::size_t begin, std::size_t n) const {
        return {data + begin, rows, n, stride};
    }
};

}  // namespace fived
