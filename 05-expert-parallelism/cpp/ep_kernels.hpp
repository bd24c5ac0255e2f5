// The loops of a mixture of experts that are no matrix product: the choice of experts, the permutation of the tokens by
// expert, the weighted sum, SwiGLU; forward and backward.
//
// T tokens  E experts  K experts a token  D width  F width of an expert
// R = T K rows, one for each choice, sorted by expert
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "fived/math/kernels.hpp"
#include "fived/math/matrix.hpp"
#include "fived/named.hpp"

namespace fived {

using Choices = std::span<const std::uint32_t>;

/// A choice's weight: the softmax over the token's chosen experts, as in Mixtral
/// (arXiv:2401.04088, section 2.1); or over all experts, as in Switch (arXiv:2101.03961, equation 2).
enum class Weights { renormalised, softmax };
constexpr auto names(Weights) {
    return std::array{"renormalised", "softmax"};
}

/// The experts of the K largest logits of each token, and their weights, both by falling logit. The logits become the
/// softmax from which the weights are taken, 0 for experts outside it.
template <class T>
void route(MatrixView<T> scores_TE, std::size_t K, Weights weights, std::span<std::uint32_t> expert_TK,
           std::span<T> weight_TK) {
    constexpr T chosen = -std::numeric_limits<T>::infinity();
    std::vector<T> left_E(scores_TE.columns);
    for (std::size_t t = 0; t < scores_TE.rows; ++t) {
        const std::span<T> s_E = scores_TE.row(t);
        std::ranges::copy(s_E, left_E.begin());
        for (std::size_t k = t * K; k < t * K + K; ++k) {
            const auto best = std::ranges::max_element(left_E);
            expert_TK[k] = std::uint32_t(best - left_E.begin());
            *best = chosen;
        }
        const T largest = s_E[expert_TK[t * K]];
        T sum = 0;
        for (std::size_t e = 0; e < s_E.size(); ++e) {
            s_E[e] =
                weights == Weights::renormalised && left_E[e] != chosen ? T(0) : std::exp(s_E[e] - largest);
            sum += s_E[e];
        }
        for (T& s : s_E) s /= sum;
        for (std::size_t k = t * K; k < t * K + K; ++k) weight_TK[k] = s_E[expert_TK[k]];
    }
}

/// The softmax becomes the gradient of the logits: s_e (ds_e - sum over c of s_c ds_c), where ds is that of the weight
/// of a chosen expert and 0 of others.
template <class T>
void route_backward(Choices expert_TK, std::span<const T> weight_TK, std::span<const T> dweight_TK,
                    MatrixView<T> scores_TE) {
    const std::size_t K = scores_TE.rows ? expert_TK.size() / scores_TE.rows : 0;
    for (std::size_t t = 0; t < scores_TE.rows; ++t) {
        const std::span<T> s_E = scores_TE.row(t);
        T mean = 0;
        for (std::size_t k = t * K; k < t * K + K; ++k) mean += weight_TK[k] * dweight_TK[k];
        for (T& s : s_E) s *= -mean;
        for (std::size_t k = t * K; k < t * K + K; ++k) s_E[expert_TK[k]] += weight_TK[k] * dweight_TK[k];
    }
}

/// Sorts the choices by expert, those of one expert by token: the row of each choice; first_E[e] is the first row of
/// expert e and first_E[E] their number.
inline void sort_by_expert(Choices expert_TK, std::span<std::uint32_t> row_TK,
                           std::span<std::size_t> first_E) {
    std::ranges::fill(first_E, 0);
    for (const std::uint32_t e : expert_TK) ++first_E[e + 1];
    std::partial_sum(first_E.begin(), first_E.end(), first_E.begin());
    std::vector<std::size_t> next(first_E.begin(), first_E.end());
    for (std::size_t k = 0; k < expert_TK.size(); ++k) row_TK[k] = std::uint32_t(next[expert_TK[k]]++);
}

/// Each token to its K rows.
template <class T>
void permute(MatrixView<const T> x_TD, Choices row_TK, MatrixView<T> rows_RD) {
    for (std::size_t k = 0; k < row_TK.size(); ++k)
        std::ranges::copy(x_TD.row(k / (row_TK.size() / x_TD.rows)), rows_RD.row(row_TK[k]).begin());
}

/// dx = the sum of the gradients of a token's K rows.
template <class T>
void permute_backward(MatrixView<const T> drows_RD, Choices row_TK, MatrixView<T> dx_TD) {
    const std::size_t K = dx_TD.rows ? row_TK.size() / dx_TD.rows : 0;
    for (std::size_t t = 0; t < dx_TD.rows; ++t) {
        T* __restrict dx = dx_TD.row(t).data();
        for (std::size_t k = 0; k < K; ++k) {
            const T* __restrict drow = drows_RD.row(row_TK[t * K + k]).data();
            for (std::size_t d = 0; d < dx_TD.columns; ++d) dx[d] = (k == 0 ? 0 : dx[d]) + drow[d];
        }
    }
}

/// y = the sum of a token's K rows times their weights.
template <class T>
void combine(MatrixView<const T> rows_RD, Choices row_TK, std::span<const T> weight_TK, MatrixView<T> y_TD) {
    const std::size_t K = y_TD.rows ? row_TK.size() / y_TD.rows : 0;
    for (std::size_t t = 0; t < y_TD.rows; ++t) {
        T* __restrict y = y_TD.row(t).data();
        for (std::size_t k = 0; k < K; ++k) {
            const T* __restrict row = rows_RD.row(row_TK[t * K + k]).data();
            const T weight = weight_TK[t * K + k];
            for (std::size_t d = 0; d < y_TD.columns; ++d) y[d] = (k == 0 ? 0 : y[d]) + weight * row[d];
        }
    }
}

/// The gradient of a weight is row . dy, that of a row is its weight times dy and takes the row's place.
template <class T>
void combine_backward(MatrixView<const T> dy_TD, Choices row_TK, std::span<const T> weight_TK,
                      std::span<T> dweight_TK, MatrixView<T> rows_RD) {
    for (std::size_t k = 0; k < row_TK.size(); ++k) {
        const T* __restrict dy = dy_TD.row(k / (row_TK.size() / dy_TD.rows)).data();
        T* __restrict row = rows_RD.row(row_TK[k]).data();
        const T weight = weight_TK[k];
        T product = 0;
#pragma omp simd reduction(+ : product)
        for (std::size_t d = 0; d < dy_TD.columns; ++d) {
            product += row[d] * dy[d];
            row[d] = weight * dy[d];
        }
        dweight_TK[k] = product;
    }
}

/// a = silu(g) u (Shazeer, arXiv:2002.05202), silu(g) = g s(g) with the logistic function s; g and u become the
/// derivatives of a by g and by u, all that the backward pass needs.
template <class T>
void swiglu(MatrixView<T> g_RF, MatrixView<T> u_RF, MatrixView<T> a_RF) {
    for (std::size_t r = 0; r < g_RF.rows; ++r) {
        T* __restrict g = g_RF.row(r).data();
        T* __restrict u = u_RF.row(r).data();
        T* __restrict a = a_RF.row(r).data();
#pragma omp simd
        for (std::size_t f = 0; f < g_RF.columns; ++f) {
            const T e = exponential(-g[f]), s = 1 / (1 + e), silu = g[f] * s;
            a[f] = silu * u[f];
            g[f] = u[f] * (s + silu * (e * s));
            u[f] = silu;
        }
    }
}

/// The derivatives become the gradients of g and u.
template <class T>
void swiglu_backward(MatrixView<const T> da_RF, MatrixView<T> g_RF, MatrixView<T> u_RF) {
    for (std::size_t r = 0; r < da_RF.rows; ++r) {
        const T* __restrict da = da_RF.row(r).data();
        T* __restrict g = g_RF.row(r).data();
        T* __restrict u = u_RF.row(r).data();
#pragma omp simd
        for (std::size_t f = 0; f < da_RF.columns; ++f) g[f] *= da[f], u[f] *= da[f];
    }
}

}  // namespace fived
