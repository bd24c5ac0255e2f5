// What DataParallel and Zero1 stand on: counted messages, hooks behind gradients, and how parameters become buckets.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace fived {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;

/// One message of a group of n ranks: this rank sent n_bytes / n bytes, by the ring's count, and was blocked
/// for `seconds`.
struct Message {
    std::string op;
    std::int64_t n_bytes;
    double seconds;
};

/// The collectives of one group, started here and waited for later. S: bytes of the whole tensor.
class Messages {
  public:
    /// `group` is null for one rank, which sends nothing.
    explicit Messages(const Group& group) : group_(group && group->getSize() > 1 ? group : Group()) {}
    int rank() const { return group_ ? group_->getRank() : 0; }
    int size() const { return group_ ? group_->getSize() : 1; }

    struct Pending {
        c10::intrusive_ptr<c10d::Work> work;
        Message message;
    };
    /// In place: P to R. Sends 2 (n-1)/n S.
    [[nodiscard]] Pending all_reduce(at::Tensor x);
    /// In place: rank 0's to R. (n-1)/n S.
    [[nodiscard]] Pending broadcast(at::Tensor x);
    /// P to S: `mine`, this rank's run of x, becomes the sum of all ranks' runs there. (n-1)/n S.
    [[nodiscard]] Pending reduce_scatter(at::Tensor mine, at::Tensor x);
    /// S to R: x becomes every rank's `mine`, which is this rank's run of it. (n-1)/n S.
    [[nodiscard]] Pending all_gather(at::Tensor x, at::Tensor mine);
    void wait(Pending& pending);
    /// What was sent since the last call.
    std::vector<Message> take() { return std::exchange(sent_, {}); }

  private:
    template <class Start>
    Pending start(const char* op, std::int64_t times, const at::Tensor& whole, Start call);

    Group group_;
    std::vector<Message> sent_;
};

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
Tensors start_equal(const Tensors& tensors, Messages& messages);

/// Cuts the tensors, in `order`, into buckets of at least `bucket_bytes`, each of one type on one device. Throws
/// std::invalid_argument when bucket_bytes is 0.
std::vector<std::vector<std::int64_t>> cut_into_buckets(const Tensors& tensors,
                                                        const std::vector<std::int64_t>& order,
                                                        std::size_t bucket_bytes);

/// The tensors' indices from the last to the first, as the backward pass runs through layers.
std::vector<std::int64_t> last_to_first(std::size_t count);

/// The same memory as a tensor of its own. The optimizers of C++ refuse gradients that are views to autograd.
at::Tensor part(const at::Tensor& flat, std::int64_t start, at::IntArrayRef sizes);

}  // namespace fived
