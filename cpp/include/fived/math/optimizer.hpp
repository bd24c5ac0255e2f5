// Optimizers on flat arrays: one pass over weights, gradients and state.
//
// Another one is a class with step(weights, gradients) and a `kind`; the chapters' models take any. Where ranks step with
// parts of the weights (ZeRO-1, stages, shards), it must work number by number: a norm of the whole would need a sum over
// ranks.
#pragma once

#include <array>
#include <cmath>
#include <span>
#include <vector>

#include "fived/named.hpp"

namespace fived {

enum class OptimizerKind { sgd, adamw };
constexpr auto names(OptimizerKind) {
    return std::array{"sgd", "adamw"};
}
/// As tables print it.
constexpr const char* title_of(OptimizerKind kind) {
    return kind == OptimizerKind::sgd ? "SGD" : "AdamW";
}

/// w -= rate g
struct Sgd {
    static constexpr OptimizerKind kind = OptimizerKind::sgd;
    double rate = 0.1;

    template <class T>
    void step(std::span<T> weights, std::span<const T> gradients) const {
        T* __restrict w = weights.data();
        const T* __restrict g = gradients.data();
        const T r = T(rate);
#pragma omp simd
        for (std::size_t i = 0; i < weights.size(); ++i) w[i] -= r * g[i];
    }
};

/// Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), as torch.optim.AdamW.
template <class T>
class AdamW {
  public:
    static constexpr OptimizerKind kind = OptimizerKind::adamw;
    /// epsilon as in LLaMA 2: AdamW enlarges the rounding of a gradient that is zero by rate / epsilon.
    double rate = 1e-3, beta1 = 0.9, beta2 = 0.999, epsilon = 1e-5, decay = 0.01;

    void step(std::span<T> weights, std::span<const T> gradients) {
        resize(weights.size());
        ++steps_;
        const T keep = T(1 - rate * decay), b1 = T(beta1), b2 = T(beta2), c1 = T(1 - beta1),
                c2 = T(1 - beta2);
        const T size = T(rate / (1 - std::pow(beta1, steps_))), eps = T(epsilon);
        const T root = T(1 / std::sqrt(1 - std::pow(beta2, steps_)));
        T* __restrict w = weights.data();
        T* __restrict m = mean_.data();
        T* __restrict v = square_.data();
        const T* __restrict g = gradients.data();
#pragma omp simd
        for (std::size_t i = 0; i < weights.size(); ++i) {
            m[i] = b1 * m[i] + c1 * g[i];
            v[i] = b2 * v[i] + c2 * g[i] * g[i];
            w[i] = keep * w[i] - size * m[i] / (std::sqrt(v[i]) * root + eps);
        }
    }
    /// Both means, as long as the weights that were given to step().
    std::size_t state_bytes() const { return (mean_.size() + square_.size()) * sizeof(T); }
    /// Makes the state of so many weights, zeros, where there is none yet.
    void resize(std::size_t weights) { mean_.resize(weights), square_.resize(weights); }
    std::span<T> mean() { return mean_; }
    std::span<T> square() { return square_; }
    int steps() const { return steps_; }
    void set_steps(int steps) { steps_ = steps; }

  private:
    std::vector<T> mean_, square_;
    int steps_ = 0;
};

}  // namespace fived
