// The loops of a Transformer layer that are no matrix product, forward and backward.
//
// N tokens  D width  S sequence
#pragma once

#include <cmath>
#include <span>
#include <vector>

#include "fived/math/kernels.hpp"
#include "fived/math/matrix.hpp"

namespace fived {

/// y = weight (x - mean) / sqrt(variance + epsilon) + bias, over each row (Ba, Kiros and Hinton,
/// arXiv:1607.06450). Keeps x standardised and 1 / sqrt(variance + epsilon) for the backward pass.
template <class T>
void layer_norm(MatrixView<const T> x_ND, std::span<const T> weight_D, std::span<const T> bias_D, T epsilon,
                MatrixView<T> standard_ND, std::span<T> scale_N, MatrixView<T> y_ND) {
    const std::size_t D = x_ND.columns;
    const T* __restrict weight = weight_D.data();
    const T* __restrict bias = bias_D.data();
    for (std::size_t n = 0; n < x_ND.rows; ++n) {
        const T* __restrict x = x_ND.row(n).data();
        T* __restrict standard = standard_ND.row(n).data();
        T* __restrict y = y_ND.row(n).data();
        T mean = 0, variance = 0;
#pragma omp simd reduction(+ : mean)
        for (std::size_t d = 0; d < D; ++d) mean += x[d];
        mean /= T(D);
#pragma omp simd reduction(+ : variance)
        for (std::size_t d = 0; d < D; ++d) variance += (x[d] - mean) * (x[d] - mean);
        const T scale = scale_N[n] = 1 / std::sqrt(variance / T(D) + epsilon);
#pragma omp simd
        for (std::size_t d = 0; d < D; ++d) {
            standard[d] = (x[d] - mean) * scale;
            y[d] = standard[d] * weight[d] + bias[d];
        }
    }
}

/// dx grows by the gradient of x; those of weight and bias grow, too.
template <class T>
void layer_norm_backward(MatrixView<const T> dy_ND, MatrixView<const T> standard_ND,
                         std::span<const T> scale_N, std::span<const T> weight_D, std::span<T> dweight_D,
                         std::span<T> dbias_D, MatrixView<T> dx_ND) {
    const std::size_t D = dy_ND.columns;
    const T* __restrict weight = weight_D.data();
    T* __restrict dweight = dweight_D.data();
    T* __restrict dbias = dbias_D.data();
    for (std::size_t n = 0; n < dy_ND.rows; ++n) {
        const T* __restrict dy = dy_ND.row(n).data();
        const T* __restrict standard = standard_ND.row(n).data();
        T* __restrict dx = dx_ND.row(n).data();
        T mean = 0, slope = 0;
#pragma omp simd reduction(+ : mean, slope)
        for (std::size_t d = 0; d < D; ++d) {
            dweight[d] += dy[d] * standard[d];
            dbias[d] += dy[d];
            mean += dy[d] * weight[d];
            slope += dy[d] * weight[d] * standard[d];
        }
        mean /= T(D), slope /= T(D);
        const T scale = scale_N[n];
#pragma omp simd
        for (std::size_t d = 0; d < D; ++d) dx[d] += scale * (dy[d] * weight[d] - mean - standard[d] * slope);
    }
}

/// Row i of the products q k becomes softmax(scale s_0 ... scale s_i), and 0 for the later keys, which it
/// does not see.
template <class T>
void causal_softmax(MatrixView<T> s_SS, T scale) {
    for (std::size_t i = 0; i < s_SS.rows; ++i) {
        T* __restrict s = s_SS.row(i).data();
        T largest = s[0], sum = 0;
#pragma omp simd reduction(max : largest)
        for (std::size_t j = 0; j <= i; ++j)
            largest = s[j] > largest ? s[j] : largest;  // std::max is no vector
#pragma omp simd reduction(+ : sum)
        for (std::size_t j = 0; j <= i; ++j) {
            s[j] = exponential((s[j] - largest) * scale);
            sum += s[j];
        }
        const T factor = 1 / sum;
#pragma omp simd
        for (std::size_t j = 0; j <= i; ++j) s[j] *= factor;
        std::ranges::fill(s_SS.row(i).subspan(i + 1), T(0));
    }
}

/// The gradient of the weights p becomes that of the products q k; where p is 0, so is it.
template <class T>
void softmax_backward(MatrixView<const T> p_SS, T scale, MatrixView<T> dp_SS) {
    for (std::size_t i = 0; i < p_SS.rows; ++i) {
        const T* __restrict p = p_SS.row(i).data();
        T* __restrict dp = dp_SS.row(i).data();
        T mean = 0;
#pragma omp simd reduction(+ : mean)
        for (std::size_t j = 0; j < p_SS.columns; ++j) mean += p[j] * dp[j];
#pragma omp simd
        for (std::size_t j = 0; j < p_SS.columns; ++j) dp[j] = p[j] * (dp[j] - mean) * scale;
    }
}

/// y = x + z + bias
template <class T>
void add_with_bias(MatrixView<const T> x_ND, MatrixView<const T> z_ND, std::span<const T> bias_D,
                   MatrixView<T> y_ND) {
    for (std::size_t n = 0; n < x_ND.rows; ++n)
        for (std::size_t d = 0; d < bias_D.size(); ++d) y_ND(n, d) = x_ND(n, d) + z_ND(n, d) + bias_D[d];
}

}  // namespace fived
