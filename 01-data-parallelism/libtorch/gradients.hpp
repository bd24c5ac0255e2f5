// What DataParallel and Zero1 stand on: hooks behind gradients, and how parameters become buckets.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "fived/torch/ranks.hpp"

namespace fived {

/// Calls ready(i) in every backward pass, once tensor i's grad holds its gradient; takes its hooks out at the end.
class GradientHooks {
  public:
    GradientHooks(const Tensors& tensors, const std::function<void(std::size_t)>& ready);
    ~GradientHooks();
    GradientHooks(const GradientHooks&) = delete;
    GradientHooks& operator=(const GradientHooks&) = delete;

  private:
    struct Hook {
        c10::intrusive_ptr<torch::autograd::Node> node;  // held, since the tensor only knows it weakly
        std::uintptr_t key;
    };
    std::vector<Hook> hooks_;
};

/// While one lives, backward passes send nothing.
class NoSync {
  public:
    explicit NoSync(bool& synchronising) : flag_(synchronising), before_(std::exchange(flag_, false)) {}
    ~NoSync() { flag_ = before_; }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

  private:
    bool& flag_;
    bool before_;
};

/// Collective: all tensors become those of rank 0. Returns those that require a gradient; one given twice counts
/// once. Throws std::invalid_argument when there are none, or something is no leaf.
Tensors start_equal(const Tensors& tensors, Ranks& ranks);

/// Cuts the tensors, in `order`, into buckets of at least `bucket_bytes`, each of one type on one device. Throws
/// std::invalid_argument when bucket_bytes is 0.
std::vector<std::vector<std::int64_t>> cut_into_buckets(const Tensors& tensors,
                                                        const std::vector<std::int64_t>& order,
                                                        std::size_t bucket_bytes);

/// The tensors' indices from the last to the first, as the backward pass runs through layers.
std::vector<std::int64_t> last_to_first(std::size_t count);

/// Makes the gradient of `tensor` a view, `place`, so that from now on autograd accumulates there.
void move_gradient(const at::Tensor& tensor, const at::Tensor& place);

/// The same memory as a tensor of its own. The optimizers of C++ refuse gradients that are views to autograd.
at::Tensor part(const at::Tensor& flat, std::int64_t start, at::IntArrayRef sizes);

}  // namespace fived
