// Data parallelism on LibTorch: every rank holds the model and a part of the batch; gradients are summed, in
// buckets that travel while autograd still computes the gradients that come later.
//
//     autograd      dW5 ──► dW4 ──► dW3 ──► dW2 ──► dW1                        time ─►
//     hooks           └──┬───┘       └──┬───┘        └──┐
//     buckets         [ 5 4 ] sent   [ 3 2 ] sent    [ 1 | who used what ] sent by finish()
//
// The hook stands behind the parameter's AccumulateGrad node, so it finds the gradient of this backward pass
// and of all earlier micro-batches in p.grad. A hook on the tensor itself would get the last one alone.
//
// Cost of a step: a rank sends 2 (n-1)/n bytes a byte of gradient, and holds one more copy of the gradients.
//
//     DataParallel dp(model->parameters(), group, 8 << 20);
//     { const NoSync accumulate = dp.no_sync(); loss(...).backward(); }   // all micro-batches but the last
//     loss(...).backward();                                               // buckets leave while this runs
//     dp.finish();                                                        // gradients are sums over ranks
//     optimizer.step();                                                   // any of torch: the same step on every rank
//
// A bucket, and so the sum, has the type of its parameters (make_buckets). With bucket_bytes larger than the model there is one
// bucket, which finish() sends: nothing overlaps.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gradients.hpp"

namespace fived {

/// Sums the gradients of `tensors` over a process group. Losses are divided by the targets of the whole global
/// batch, so ranks may hold unequal parts, or none. A gradient that no rank has stays undefined.
///
/// Clear every gradient before the next step: what is left would be summed again. A tensor unfrozen or put in
/// later is not seen: make a new DataParallel then.
class DataParallel {
  public:
    /// Collective: all tensors become those of rank 0. Frozen ones and buffers are only that, never summed;
    /// one given twice counts once. `group` is null for one rank. Throws std::invalid_argument when nothing
    /// requires a gradient, something is no leaf, or bucket_bytes is 0.
    DataParallel(const Tensors& tensors, const Group& group, std::size_t bucket_bytes);

    NoSync no_sync() { return NoSync(synchronising_); }
    /// What no_sync() turns off while it lives.
    bool& synchronising() { return synchronising_; }

    /// Collective: sends what is left and waits; then gradients are sums over the ranks. A second backward
    /// before it throws std::runtime_error, since its gradients would join buckets that have left.
    void finish();

    std::size_t buckets() const { return buckets_.size(); }
    /// What was sent since the last call.
    std::vector<Message> take_messages() { return ranks_.take_messages(); }

  private:
    struct Parameter {
        at::Tensor tensor, view;  // view: where its gradient lies in the bucket
        std::size_t bucket = 0;
        bool filled = false;
    };
    struct Bucket {
        at::Tensor flat;
        std::size_t members, missing;
        Ranks::Pending pending;
    };

    void make_buckets(const std::vector<std::int64_t>& order);
    void ready(std::size_t index);
    void fill(std::size_t index);
    void launch();
    void settle_order();

    Ranks ranks_;
    std::size_t bucket_bytes_, launched_ = 0;
    std::vector<Parameter> parameters_;
    std::vector<Bucket> buckets_;
    at::Tensor used_;  // end of the last bucket: a number for each parameter, how many ranks used it
    std::vector<std::int64_t> order_;
    bool synchronising_ = true, order_known_ = false;
    std::mutex mutex_;                    // autograd has a thread for each device
    std::optional<GradientHooks> hooks_;  // the last member: gone before what they change
};

}  // namespace fived
