// Attention of one head over a block of keys, tile by tile: the scores of all pairs never exist at once.
//
//     out_i = sum_j e^(s_ij - m_i) v_j / l_i         s_ij = q_i k_j / sqrt K
//     m_i = max_j s_ij                               l_i = sum_j e^(s_ij - m_i)
//
//                     keys ──►
//     queries   [ whole ][ diagonal ][       ]     out, m and l hold for the keys seen so far; a larger score
//        │      [ whole ][ whole    ][ diag. ]     makes the older sums e^(m_old - m_new) times as large
//        ▼                                         (online softmax, arXiv:1805.02867)
//
// Backward makes the weights again from logsumexp = m + log l (FlashAttention-2, arXiv:2307.08691):
//
//     P = e^(s - logsumexp)     dS = P (dO V' - delta) / sqrt K     delta_i = dO_i out_i
//     dV = P' dO                dQ = dS K                           dK = dS' Q
//
// Q queries  T keys  K width of a head
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "fived/math/kernels.hpp"
#include "sp_products.hpp"

namespace fived {

template <class T>
class TiledAttention {
  public:
    explicit TiledAttention(std::size_t head_width)
        : scale_(T(1 / std::sqrt(double(head_width)))), p_(queries * stride), ds_(queries * stride) {}

    /// Adds what the keys contribute: out_QK = sum e^(s - m) v, not yet divided; largest_Q = m, sum_Q = l.
    /// `diagonal`: there are as many keys as queries, and query i sees the keys up to i.
    /// `between` is called after each tile.
    template <class Between>
    void forward(MatrixView<const T> q_QK, MatrixView<const T> k_TK, MatrixView<const T> v_TK, bool diagonal,
                 MatrixView<T> out_QK, std::span<T> largest_Q, std::span<T> sum_Q, Between between) {
        keys_.assign(k_TK);
        tiles(q_QK.rows, k_TK.rows, diagonal,
              [&](std::size_t i, std::size_t rows, std::size_t j, std::size_t columns) {
                  const MatrixView<T> p(p_.data(), rows, columns, stride), out = out_QK.row_block(i, rows);
                  keys_.multiply(q_QK.row_block(i, rows), j, p);
                  for (std::size_t r = 0; r < rows; ++r)
                      include(p.row(r), diagonal ? seen(i + r, j, columns) : columns, out.row(r),
                              largest_Q[i + r], sum_Q[i + r]);
                  tile_product<T>(p, v_TK.row_block(j, columns), out, true);
                  between();
              });
    }

    /// After the last keys: divides out by the sums; largest_Q becomes the logsumexp.
    void finish(MatrixView<T> out_QK, std::span<T> largest_Q, std::span<const T> sum_Q) const {
        for (std::size_t i = 0; i < out_QK.rows; ++i) {
            for (T& x : out_QK.row(i)) x /= sum_Q[i];
            largest_Q[i] += std::log(sum_Q[i]);
        }
    }

    /// dq, dk and dv grow by what the pairs of these queries and keys contribute. delta_Q = sum of dout out.
    template <class Between>
    void backward(MatrixView<const T> q_QK, MatrixView<const T> k_TK, MatrixView<const T> v_TK, bool diagonal,
                  MatrixView<const T> dout_QK, std::span<const T> logsumexp_Q, std::span<const T> delta_Q,
                  MatrixView<T> dq_QK, MatrixView<T> dk_TK, MatrixView<T> dv_TK, Between between) {
        keys_.assign(k_TK), values_.assign(v_TK);
        tiles(q_QK.rows, k_TK.rows, diagonal,
              [&](std::size_t i, std::size_t rows, std::size_t j, std::size_t columns) {
                  const MatrixView<const T> q = q_QK.row_block(i, rows), dout = dout_QK.row_block(i, rows);
                  const MatrixView<T> p(p_.data(), rows, columns, stride),
                      ds(ds_.data(), rows, columns, stride);
                  keys_.multiply(q, j, p);
                  values_.multiply(dout, j, ds);
                  for (std::size_t r = 0; r < rows; ++r)
                      slopes(p.row(r), ds.row(r), diagonal ? seen(i + r, j, columns) : columns,
                             logsumexp_Q[i + r], delta_Q[i + r]);
                  tile_product<T>(t(p), dout, dv_TK.row_block(j, columns), true);
                  tile_product<T>(ds, k_TK.row_block(j, columns), dq_QK.row_block(i, rows), true);
                  tile_product<T>(t(ds), q, dk_TK.row_block(j, columns), true);
                  between();
              });
    }

  private:
    // Two tiles of scores, and the numbers they are made from, fit the second-level cache. The rows of a tile
    // do not lie a power of two apart, or they would share few lines of the first.
    static constexpr std::size_t queries = 128, keys = 512, stride = keys + lanes<T>;

    /// Calls use(first query, queries, first key, keys) for the tiles in which a query sees a key: the keys
    /// of a tile meet all queries before the next.
    template <class Use>
    static void tiles(std::size_t Q, std::size_t T_, bool diagonal, Use use) {
        for (std::size_t j = 0; j < T_; j += keys)
            for (std::size_t i = diagonal ? j : 0; i < Q; i += queries) {
                const std::size_t rows = std::min(queries, Q - i), end = diagonal ? i + rows : T_;
                use(i, rows, j, std::min(keys, end - j));
            }
    }

    /// How many of `columns` keys from key j on query i sees.
    static std::size_t seen(std::size_t i, std::size_t j, std::size_t columns) {
        return i < j ? 0 : std::min(columns, i + 1 - j);
    }

    /// Products q k of one query become e^(s - m); its older sums are corrected to the new m.
    void include(std::span<T> p, std::size_t seen, std::span<T> out, T& largest, T& sum) const {
        std::ranges::fill(p.subspan(seen), T(0));
        if (seen == 0) return;
        T* __restrict s = p.data();
        T top = s[0], added = 0;
#pragma omp simd reduction(max : top) simdlen(lanes<T>)
        for (std::size_t c = 0; c < seen; ++c) top = s[c] > top ? s[c] : top;  // std::max is no vector
        const T m = std::max(largest, top * scale_), correction = std::exp(largest - m), scale = scale_;
#pragma omp simd reduction(+ : added) simdlen(lanes<T>)
        for (std::size_t c = 0; c < seen; ++c) {
            s[c] = exponential(s[c] * scale - m);
            added += s[c];
        }
        sum = sum * correction + added;
        largest = m;
        if (correction == 1) return;
        for (T& x : out) x *= correction;
    }

    /// Products q k become the weights p, and dO v the gradients of the products.
    void slopes(std::span<T> p_T, std::span<T> ds_T, std::size_t seen, T logsumexp, T delta) const {
        std::ranges::fill(p_T.subspan(seen), T(0));
        std::ranges::fill(ds_T.subspan(seen), T(0));
        T* __restrict p = p_T.data();
        T* __restrict ds = ds_T.data();
        const T scale = scale_;
#pragma omp simd simdlen(lanes<T>)
        for (std::size_t c = 0; c < seen; ++c) {
            p[c] = exponential(p[c] * scale - logsumexp);
            ds[c] = p[c] * (ds[c] - delta) * scale;
        }
    }

    T scale_;
    std::vector<T> p_, ds_;
    TransposedPanels<T> keys_, values_;
};

}  // namespace fived
