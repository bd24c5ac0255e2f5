// Products of tiles that are in cache already. A BLAS copies its factors into an order of its own at every
// call; where one side is only as wide as a head, that takes a third of the time.
//
//     c_MJ (+)= a_MD b_DJ      6 rows and 2 or 4 vectors of c stay in registers while d runs; each number of
//                              a meets the vectors of a row of b, so a may be transposed
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "fived/math/blas.hpp"
#include "fived/math/matrix.hpp"

namespace fived {

#if defined(__AVX512F__)
inline constexpr std::size_t vector_bytes = 64, vectors_of_tile = 4;  // 32 registers
#elif defined(__AVX__)
inline constexpr std::size_t vector_bytes = 32, vectors_of_tile = 2;  // 16 registers
#else
inline constexpr std::size_t vector_bytes = 16, vectors_of_tile = 2;
#endif

/// Numbers of a vector, and columns of b and c that are worked on together.
template <class T>
inline constexpr std::size_t lanes = vector_bytes / sizeof(T);
template <class T>
inline constexpr std::size_t panel = vectors_of_tile * lanes<T>;

namespace detail {

/// R rows and V vectors of c. a(r, d) = a[r * row + d * step].
template <int R, int V, class T>
void product_in_registers(const T* a, std::size_t row, std::size_t step, const T* b, std::size_t b_stride,
                          T* c, std::size_t c_stride, std::size_t depth, bool add) {
    typedef T Vector __attribute__((vector_size(vector_bytes), aligned(sizeof(T)), may_alias));
    constexpr std::size_t L = lanes<T>;
    Vector sum[R][V] = {};
    for (std::size_t d = 0; d < depth; ++d, a += step, b += b_stride) {
        Vector right[V];
        for (int v = 0; v < V; ++v) right[v] = *reinterpret_cast<const Vector*>(b + v * L);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) sum[r][v] += a[r * row] * right[v];
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) {
            Vector& to = *reinterpret_cast<Vector*>(c + r * c_stride + v * L);
            to = add ? to + sum[r][v] : sum[r][v];  // c is added last: a sum of sums rounds less
        }
}

template <int V, class T>
void columns_product(const T* a, std::size_t row, std::size_t step, const T* b, std::size_t b_stride,
                     MatrixView<T> c, std::size_t depth, bool add) {
    std::size_t i = 0;
    for (; i + 6 <= c.rows; i += 6)
        product_in_registers<6, V>(a + i * row, row, step, b, b_stride, &c(i, 0), c.stride, depth, add);
    for (; i + 2 <= c.rows; i += 2)
        product_in_registers<2, V>(a + i * row, row, step, b, b_stride, &c(i, 0), c.stride, depth, add);
    for (; i < c.rows; ++i)
        product_in_registers<1, V>(a + i * row, row, step, b, b_stride, &c(i, 0), c.stride, depth, add);
}

}  // namespace detail

/// c = a b, or c += a b. The shapes have to match.
template <class T>
void tile_product(std::type_identity_t<Factor<T>> a, std::type_identity_t<MatrixView<const T>> b,
                  MatrixView<T> c, bool add) {
    const std::size_t row = a.transposed ? 1 : a.matrix.stride, step = a.transposed ? a.matrix.stride : 1;
    std::size_t j = 0;
    for (; j + panel<T> <= c.columns; j += panel<T>)
        detail::columns_product<int(vectors_of_tile)>(a.matrix.data, row, step, b.data + j, b.stride,
                                                      c.column_block(j, panel<T>), b.rows, add);
    for (; j + lanes<T> <= c.columns; j += lanes<T>)
        detail::columns_product<1>(a.matrix.data, row, step, b.data + j, b.stride,
                                   c.column_block(j, lanes<T>), b.rows, add);
    if (j == c.columns) return;
    for (std::size_t i = 0; i < c.rows; ++i) {  // less than a vector
        if (!add) std::fill(&c(i, 0) + j, &c(i, 0) + c.columns, T(0));
        for (std::size_t d = 0; d < b.rows; ++d)
            for (std::size_t x = j; x < c.columns; ++x)
                c(i, x) += a.matrix.data[i * row + d * step] * b(d, x);
    }
}

/// A matrix transposed, in panels: columns [p W, (p + 1) W) of x' lie together, so that they fill few cache
/// lines.
template <class T>
class TransposedPanels {
  public:
    static constexpr std::size_t W = panel<T>;

    void assign(MatrixView<const T> x_TK) {
        rows_ = x_TK.columns;
        data_.assign((x_TK.rows + W - 1) / W * W * rows_, T(0));  // the last panel is filled up with zeros
        for (std::size_t i = 0; i < x_TK.rows; ++i)
            for (std::size_t k = 0; k < rows_; ++k) data_[(i / W * rows_ + k) * W + i % W] = x_TK(i, k);
    }
    /// c = a x', for columns [begin, begin + columns of c) of x'; begin is a multiple of W. c is written up
    /// to a full panel: its stride has to leave room.
    void multiply(MatrixView<const T> a, std::size_t begin, MatrixView<T> c) const {
        for (std::size_t j = 0; j < c.columns; j += W)
            tile_product<T>(a, {data_.data() + (begin + j) * rows_, rows_, W},
                            {c.data + j, c.rows, W, c.stride}, false);
    }

  private:
    std::size_t rows_ = 0;
    std::vector<T> data_;
};

}  // namespace fived
