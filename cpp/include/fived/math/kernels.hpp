// The loops of a network that are no matrix product, each one pass over memory and written so that the
// compiler turns it into vector instructions: no branches, no library calls.
//
// B = rows (samples), J = columns (features), C = classes.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <type_traits>

#include "fived/math/matrix.hpp"

namespace fived {

/// e^x to about one unit in the last place; x is held within the range where the result is a normal number.
/// e^x = 2^n e^r, n = round(x / ln 2): adding 1.5 * 2^52 rounds to an integer and leaves it in the low bits,
/// e^r is a Taylor polynomial (|r| <= ln 2 / 2), and 2^n is written straight into the exponent's bits.
template <class T>
inline T exponential(T x) {
    constexpr bool f64 = std::is_same_v<T, double>;
    using Bits = std::conditional_t<f64, std::uint64_t, std::uint32_t>;
    constexpr T limit = f64 ? T(708) : T(87), shift = f64 ? T(0x1.8p52) : T(0x1.8p23);
    constexpr T ln2_high = f64 ? T(0x1.62e42fefap-1) : T(0x1.62e4p-1);
    constexpr T ln2_low = f64 ? T(0x1.cf79abc9e3b3ap-40) : T(0x1.7f7d1cp-20);
    constexpr int mantissa = f64 ? 52 : 23, bias = f64 ? 1023 : 127;

    x = std::min(std::max(x, -limit), limit);
    const T shifted = x * T(1.4426950408889634074) + shift;
    const T n = shifted - shift;
    const T r = (x - n * ln2_high) - n * ln2_low;
    T sum;
    if constexpr (f64) {
        sum = 1.0 / 6227020800;
        for (const double term : {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                  1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
            sum = sum * r + term;
    } else {
        sum = 1.0f / 5040;
        for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
            sum = sum * r + term;
    }
    return sum * std::bit_cast<T>(static_cast<Bits>((std::bit_cast<Bits>(shifted) + bias) << mantissa));
}

/// a = GELU(z + bias), tanh approximation, and z becomes GELU'(z + bias), all that the backward pass needs.
/// GELU(z) = z s(w) with the logistic function s and w = sqrt(8/pi) (z + 0.044715 z^3): the same as
/// z/2 (1 + tanh(w/2)) (Hendrycks and Gimpel, arXiv:1606.08415), without its cancellation at negative z.
template <class T>
void bias_gelu(MatrixView<T> z_BJ, std::span<const T> bias_J, MatrixView<T> a_BJ) {
    constexpr T c = T(1.5957691216057307117), cubic = T(0.044715);
    for (std::size_t b = 0; b < z_BJ.rows; ++b) {
        T* __restrict z = z_BJ.row(b).data();
        T* __restrict a = a_BJ.row(b).data();
        const T* __restrict bias = bias_J.data();
#pragma omp simd
        for (std::size_t j = 0; j < bias_J.size(); ++j) {
            const T v = z[j] + bias[j], v2 = v * v;
            const T e = exponential(-c * v * (1 + cubic * v2)), s = 1 / (1 + e);
            a[j] = v * s;
            z[j] = s + v * s * (e * s) * c * (1 + 3 * cubic * v2);
        }
    }
}

/// z' = a' GELU'(z): `slope` holds GELU'(z) and becomes z'; the bias's gradient grows by the sum over the
/// rows.
template <class T>
void gelu_backward(MatrixView<const T> da_BJ, MatrixView<T> slope_BJ, std::span<T> dbias_J) {
    for (std::size_t b = 0; b < da_BJ.rows; ++b) {
        const T* __restrict da = da_BJ.row(b).data();
        T* __restrict slope = slope_BJ.row(b).data();
        T* __restrict dbias = dbias_J.data();
#pragma omp simd
        for (std::size_t j = 0; j < dbias_J.size(); ++j) {
            slope[j] *= da[j];
            dbias[j] += slope[j];
        }
    }
}

template <class T>
void add_bias(MatrixView<T> z_BJ, std::span<const T> bias_J) {
    for (std::size_t b = 0; b < z_BJ.rows; ++b)
        for (std::size_t j = 0; j < bias_J.size(); ++j) z_BJ(b, j) += bias_J[j];
}

/// The gradient of a bias grows by the sum over the rows.
template <class T>
void add_rows(MatrixView<const T> dy_BJ, std::span<T> dbias_J) {
    for (std::size_t b = 0; b < dy_BJ.rows; ++b)
        for (std::size_t j = 0; j < dbias_J.size(); ++j) dbias_J[j] += dy_BJ(b, j);
}

/// The sum over the rows, which is the gradient of a bias.
template <class T>
void sum_of_rows(MatrixView<const T> dy_BJ, std::span<T> dbias_J) {
    std::ranges::fill(dbias_J, T(0));
    add_rows(dy_BJ, dbias_J);
}

/// Sum of the cross-entropies of logits z + bias with the classes y, times `scale`. z becomes the gradient of
/// that; the bias's gradient grows by its sum over the rows.
template <class T>
double softmax_cross_entropy(MatrixView<T> z_BC, std::span<const T> bias_C, std::span<const std::uint8_t> y_B,
                             T scale, std::span<T> dbias_C) {
    double loss = 0;
    const std::size_t C = bias_C.size();
    for (std::size_t b = 0; b < z_BC.rows; ++b) {
        T* __restrict z = z_BC.row(b).data();
        const T* __restrict bias = bias_C.data();
        T* __restrict dbias = dbias_C.data();
        T largest = z[0] + bias[0], sum = 0;
#pragma omp simd reduction(max : largest)
        for (std::size_t c = 0; c < C; ++c) {
            z[c] += bias[c];
            largest = std::max(largest, z[c]);
        }
        const T target = z[y_B[b]];
#pragma omp simd reduction(+ : sum)
        for (std::size_t c = 0; c < C; ++c) {
            z[c] = exponential(z[c] - largest);
            sum += z[c];
        }
        loss += static_cast<double>(std::log(sum) + largest - target);
        const T factor = scale / sum;
#pragma omp simd
        for (std::size_t c = 0; c < C; ++c) z[c] *= factor;
        z[y_B[b]] -= scale;
#pragma omp simd
        for (std::size_t c = 0; c < C; ++c) dbias[c] += z[c];
    }
    return loss * scale;
}

/// Sum of the squares, in float64 for both types.
template <class T>
double sum_of_squares(std::span<const T> values) {
    double sum = 0;
    const T* v = values.data();
#pragma omp simd reduction(+ : sum)
    for (std::size_t i = 0; i < values.size(); ++i)
        sum += static_cast<double>(v[i]) * static_cast<double>(v[i]);
    return sum;
}

}  // namespace fived
