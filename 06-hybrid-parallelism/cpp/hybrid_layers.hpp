// The layers of a block, each with the two halves of its backward pass: for the input at once, for the weights when the
// schedule says.
//
// N tokens of a micro-batch on this rank  D width  I, O inputs and outputs of a product
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "fived/math/blas.hpp"
#include "fived/math/kernels.hpp"
#include "hybrid_parameters.hpp"
#include "tp_kernels.hpp"

namespace fived {

/// An array that grows to the largest size seen and stays: a step allocates nothing.
template <class T>
class Work {
  public:
    std::span<T> numbers(std::size_t n) {
        if (data_.size() < n) data_.resize(n);
        return {data_.data(), n};
    }
    MatrixView<T> matrix(std::size_t rows, std::size_t columns) {
        return {numbers(rows * columns).data(), rows, columns};
    }

  private:
    std::vector<T> data_;
};

template <class T>
void copy_rows(MatrixView<const T> from, MatrixView<T> to) {
    for (std::size_t n = 0; n < from.rows; ++n) std::ranges::copy(from.row(n), to.row(n).begin());
}

/// y = x w'. A bias is the caller's: of a row-parallel product it is added after the sum over tp.
template <class T>
class Product {
  public:
    using Id = typename Parameters<T>::Id;

    /// together: this many parameters that lie one after the other, such as q, k and v, are one matrix. expert: whose
    /// product it is, where weight and bias have those of all experts.
    Product(Parameters<T>& parameters, Id weight, Id bias, std::size_t together = 1, std::size_t expert = 0)
        : parameters_(&parameters), weight_(weight), bias_(bias), together_(together), expert_(expert) {}

    std::size_t outputs() const { return weight().rows; }
    std::span<T> bias() const { return of_expert(parameters_->vector(bias_)); }
    std::span<T> bias_gradient() const { return of_expert(parameters_->vector_gradient(bias_)); }

    void forward(MatrixView<const T> x_NI, MatrixView<T> y_NO) const { gemm<T>(x_NI, t(weight()), y_NO); }
    void backward_input(MatrixView<const T> dy_NO, MatrixView<T> dx_NI) const {
        gemm<T>(dy_NO, weight(), dx_NI);
    }
    void backward_weights(MatrixView<const T> dy_NO, MatrixView<const T> x_NI) const {
        gemm<T>(t(dy_NO), x_NI, stacked(parameters_->matrix_gradient(weight_, expert_)), 1);
    }

  private:
    MatrixView<T> weight() const { return stacked(parameters_->matrix(weight_, expert_)); }
    MatrixView<T> stacked(MatrixView<T> first) const {
        return {first.data, together_ * first.rows, first.columns};
    }

    /// The bias of the products that are together begins with the first one's.
    std::span<T> of_expert(std::span<T> biases) const {
        return {biases.data() + expert_ * outputs(), outputs()};
    }

    Parameters<T>* parameters_;
    Id weight_, bias_;
    std::size_t together_, expert_;
};

template <class T>
class Norm {
  public:
    struct Kept {
        Work<T> standard, scale, y;
    };

    Norm(Parameters<T>& parameters, const std::string& name, std::size_t width, double epsilon)
        : parameters_(&parameters),
          weight_(parameters.add(name + ".weight", {width})),
          bias_(parameters.add(name + ".bias", {width})),
          epsilon_(T(epsilon)) {}

    /// Returns y_ND, which is kept.
    MatrixView<T> forward(MatrixView<const T> x_ND, Kept& kept) const {
        const auto [N, D] = std::pair(x_ND.rows, x_ND.columns);
        const MatrixView<T> y_ND = kept.y.matrix(N, D);
        layer_norm<T>(x_ND, parameters_->vector(weight_), parameters_->vector(bias_), epsilon_,
                      kept.standard.matrix(N, D), kept.scale.numbers(N), y_ND);
        return y_ND;
    }
    /// dx_ND grows.
    void backward(MatrixView<const T> dy_ND, Kept& kept, MatrixView<T> dx_ND) const {
        layer_norm_backward<T>(dy_ND, kept.standard.matrix(dy_ND.rows, dy_ND.columns),
                               kept.scale.numbers(dy_ND.rows), parameters_->vector(weight_),
                               parameters_->vector_gradient(weight_), parameters_->vector_gradient(bias_),
                               dx_ND);
    }

  private:
    Parameters<T>* parameters_;
    typename Parameters<T>::Id weight_, bias_;
    T epsilon_;
};

}  // namespace fived
