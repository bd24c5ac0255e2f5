// The reference MLP, by hand: linear layers with GELU between, cross-entropy at the end. It knows nothing of
// ranks. common/models/mlp.py is the same model with the same initial weights.
//
// B = rows of the batch, I and O = inputs and outputs of a layer, C = classes (outputs of the last layer).
//
// Weights and gradients each lie in one flat array in the order in which the backward pass finishes
// gradients: the last layer first, in each layer weight_OI, then bias_O. So what is finished is always a
// prefix of the array.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "fived/math/blas.hpp"
#include "fived/math/kernels.hpp"
#include "fived/math/matrix.hpp"
#include "fived/math/random.hpp"

namespace fived {

/// Where one parameter lies in the flat arrays.
struct Parameter {
    std::string name;  // "layers.0.weight", as in PyTorch
    std::size_t offset, rows, columns;
    std::size_t size() const { return rows * columns; }
};

/// Weights and gradients of the layers of an MLP, of all or of those that a rank has.
template <class T>
class MlpLayers {
  public:
    /// `sizes` = [inputs, hidden, ..., classes] of the whole MLP; at most 256 classes, since targets are bytes.
    /// here(l): whether layer l is. Its weights are the same whatever else is here.
    template <class Here>
    MlpLayers(const std::vector<int>& sizes, std::uint64_t seed, Here here)
        : sizes_(sizes.begin(), sizes.end()), place_(sizes.size()) {
        if (sizes.size() < 2 || *std::ranges::min_element(sizes) < 1 || sizes.back() > 256)
            throw std::invalid_argument("an MLP needs two or more sizes, all positive, the last at most 256");
        std::size_t offset = 0;
        for (std::size_t l = layers(); l-- > 0;) {
            if (!here(l)) continue;
            const std::string name = "layers." + std::to_string(l) + ".";
            place_[l] = parameters_.size();
            parameters_.push_back({name + "weight", offset, outputs(l), inputs(l)});
            parameters_.push_back({name + "bias", offset + outputs(l) * inputs(l), outputs(l), 1});
            offset += outputs(l) * (inputs(l) + 1);
        }
        weights_.resize(offset);
        gradients_.resize(offset);
        for (std::size_t l = 0; l < layers(); ++l)
            if (here(l)) initialise(l, seed);
    }

    /// Of the whole MLP, as flop_per_sample.
    std::size_t layers() const { return sizes_.size() - 1; }
    std::size_t inputs() const { return sizes_.front(); }
    std::span<const Parameter> parameters() const { return parameters_; }
    std::span<T> weights() { return weights_; }
    std::span<T> gradients() { return gradients_; }
    /// Operations of one sample, forward and backward: 2 a multiply-add; the first layer has no input
    /// gradient.
    double flop_per_sample() const {
        double flop = 0;
        for (std::size_t l = 0; l < layers(); ++l)
            flop += (l == 0 ? 4.0 : 6.0) * double(inputs(l) * outputs(l));
        return flop;
    }

  protected:
    std::size_t inputs(std::size_t l) const { return sizes_[l]; }
    std::size_t outputs(std::size_t l) const { return sizes_[l + 1]; }
    std::size_t widest() const { return *std::ranges::max_element(sizes_); }

    void check_samples(MatrixView<const T> x_BI, std::span<const std::uint8_t> y_B) const {
        if (x_BI.columns != inputs() || y_B.size() != x_BI.rows)
            throw std::invalid_argument("the MLP takes [B, " + std::to_string(inputs()) +
                                        "] and B targets; given [" + std::to_string(x_BI.rows) + ", " +
                                        std::to_string(x_BI.columns) + "] and " + std::to_string(y_B.size()));
        for (std::size_t b = 0; b < y_B.size(); ++b)
            if (y_B[b] >= sizes_.back())
                throw std::invalid_argument("target " + std::to_string(y_B[b]) + " of sample " +
                                            std::to_string(b) + " is no class; there are " +
                                            std::to_string(sizes_.back()));
    }
    /// The others are written, these grow.
    void clear_bias_gradients() {
        for (const Parameter& p : parameters_)
            if (p.columns == 1) std::ranges::fill(span(gradients_, p), T(0));
    }

    MatrixView<const T> weight(std::size_t l) const {
        return {weights_.data() + matrix(l).offset, outputs(l), inputs(l)};
    }
    std::span<const T> bias(std::size_t l) const { return {weights_.data() + vector(l).offset, outputs(l)}; }
    MatrixView<T> weight_gradient(std::size_t l) {
        return {gradients_.data() + matrix(l).offset, outputs(l), inputs(l)};
    }
    std::span<T> bias_gradient(std::size_t l) { return span(gradients_, vector(l)); }
    /// The first so many gradients end with layer l's.
    std::size_t end(std::size_t l) const { return vector(l).offset + outputs(l); }

  private:
    void initialise(std::size_t l, std::uint64_t seed) {
        const double in = double(inputs(l));
        const auto fill = [&](std::span<T> values, std::uint64_t stream, double width) {
            for (std::size_t k = 0; k < values.size(); ++k)
                values[k] = T((2 * uniform(seed, stream, k) - 1) * width);
        };
        fill(span(weights_, matrix(l)), 2 * l, std::sqrt(3 / in));
        fill(span(weights_, vector(l)), 2 * l + 1, 1 / std::sqrt(in));
    }
    const Parameter& matrix(std::size_t l) const { return parameters_[place_[l]]; }
    const Parameter& vector(std::size_t l) const { return parameters_[place_[l] + 1]; }
    static std::span<T> span(std::vector<T>& flat, const Parameter& p) {
        return {flat.data() + p.offset, p.size()};
    }

    std::vector<std::size_t> sizes_, place_;  // place_: of each layer's weight among the parameters
    std::vector<Parameter> parameters_;
    std::vector<T> weights_, gradients_;
};

template <class T>
class Mlp : public MlpLayers<T> {
  public:
    using MlpLayers<T>::layers, MlpLayers<T>::inputs;

    Mlp(const std::vector<int>& sizes, std::uint64_t seed)
        : MlpLayers<T>(sizes, seed, [](std::size_t) { return true; }), z_(layers()), a_(layers() - 1) {}

    /// Forward and backward of the rows x_BI, y_B. Returns scale * (sum of their cross-entropies) and leaves
    /// its gradients (added to those already there if `accumulate`). Calls finished(n) between matrix
    /// products: from then on the first n gradients do not change any more.
    template <class Finished>
    double loss_and_gradients(MatrixView<const T> x_BI, std::span<const std::uint8_t> y_B, double scale,
                              bool accumulate, Finished finished) {
        this->check_samples(x_BI, y_B);
        reserve(x_BI.rows);
        if (!accumulate) this->clear_bias_gradients();
        forward(x_BI);
        const std::size_t last = layers() - 1;
        const double loss = softmax_cross_entropy<T>(work(z_, last, y_B.size()), bias(last), y_B, T(scale),
                                                     bias_gradient(last));
        backward(x_BI, accumulate, finished);
        return loss;
    }

  private:
    using MlpLayers<T>::outputs, MlpLayers<T>::weight, MlpLayers<T>::bias, MlpLayers<T>::bias_gradient;

    void forward(MatrixView<const T> x_BI) {
        const std::size_t B = x_BI.rows;
        for (std::size_t l = 0; l < layers(); ++l) {
            const MatrixView<T> z_BO = work(z_, l, B);
            gemm<T>(l == 0 ? x_BI : work(a_, l - 1, B), t(weight(l)), z_BO);
            if (l + 1 < layers()) bias_gelu<T>(z_BO, bias(l), work(a_, l, B));
        }
    }

    /// From z' of the last layer (in z_) and GELU'(z) of the others.
    template <class Finished>
    void backward(MatrixView<const T> x_BI, bool accumulate, Finished finished) {
        const std::size_t B = x_BI.rows;
        for (std::size_t l = layers(); l-- > 0;) {
            const MatrixView<T> dz_BO = work(z_, l, B);
            const MatrixView<const T> input_BI = l == 0 ? x_BI : MatrixView<const T>(work(a_, l - 1, B));
            gemm<T>(t(dz_BO), input_BI, this->weight_gradient(l), accumulate ? 1 : 0);
            finished(this->end(l));
            if (l == 0) return;
            const MatrixView<T> da_BI(da_.data(), B, inputs(l));
            gemm<T>(dz_BO, weight(l), da_BI);
            gelu_backward<T>(da_BI, work(z_, l - 1, B), bias_gradient(l - 1));
            finished(this->end(l));
        }
    }

    /// Workspaces grow to the largest batch seen and stay: a step allocates nothing.
    void reserve(std::size_t B) {
        if (B <= capacity_) return;
        capacity_ = B;
        for (std::size_t l = 0; l < layers(); ++l) z_[l].resize(B * outputs(l));
        for (std::size_t l = 0; l < a_.size(); ++l) a_[l].resize(B * outputs(l));
        da_.resize(B * this->widest());
    }
    MatrixView<T> work(std::vector<std::vector<T>>& buffers, std::size_t l, std::size_t B) {
        return {buffers[l].data(), B, outputs(l)};
    }

    std::vector<T> da_;
    std::vector<std::vector<T>> z_, a_;
    std::size_t capacity_ = 0;
};

}  // namespace fived
