// ZeRO stage 1 on LibTorch: the sums of gradients go only to the rank that needs them, which steps alone on its part of
// the weights (Rajbhandari et al., arXiv:1910.02054). dp_zero.py is the same in Python, with the stages after it.
//
//     unit = a bucket of parameters in one flat buffer       [ dW5  dW4  dW3 ... | padding ]
//     rank r owns the r-th of n equal runs of it             [ rank 0 | rank 1 | rank 2    ]
//     backward     a unit is full      ── reduce-scatter ──►  my run of the gradients is the sum
//     optimizer    steps on the pieces: what of each parameter lies in my run
//     gather()     my run of the weights ── all-gather ──►    every rank has all weights
//
// Cost of a step: (n-1)/n bytes a byte of gradient and as many a byte of weight, together those of DataParallel. The
// optimizer's state is 1/n of it: it works number by number, so any cut will do, and any optimizer of torch that does.
//
//     Zero1 zero(model->parameters(), group, 8 << 20);
//     torch::optim::AdamW optimizer(zero.pieces(), 1e-3);
//     loss(...).backward();                                 // units leave while this runs
//     zero.finish();                                        // now the pieces have their gradients
//     optimizer.step();
//     zero.gather();                                        // the model has the weights of all ranks
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "gradients.hpp"

namespace fived {

/// Losses are divided by the targets of the whole global batch, as for DataParallel. Between finish() and the next
/// backward pass the gradients are those of pieces(); the parameters have none.
class Zero1 {
  public:
    /// Collective: all tensors become those of rank 0; those that require a gradient move into flat buffers. `group` is
    /// null for one rank. Throws std::invalid_argument as DataParallel does.
    Zero1(const Tensors& tensors, const Group& group, std::size_t bucket_bytes);

    /// While it lives, backward passes only add up.
    NoSync no_sync() { return NoSync(synchronising_); }
    /// What no_sync() turns off while it lives.
    bool& synchronising() { return synchronising_; }

    /// Collective: sends what is left and waits; then every piece has the sum of its gradients over the ranks, or none
    /// where no rank has one. A second backward before it throws std::runtime_error.
    void finish();
    /// Collective, after the optimizer's step: the parameters become what the ranks made of their pieces.
    void gather();
    /// Collective, after finish(): the norm of all gradients, of which each rank holds a part.
    double gradient_norm();

    /// This rank's piece of each parameter, flat; many are empty. What the optimizer steps on.
    Tensors pieces() const;
    /// How many numbers of each parameter every rank owns: [parameter][rank].
    std::vector<std::vector<std::int64_t>> sizes() const;
    std::size_t buckets() const { return units_.size(); }
    /// What was sent since the last call.
    std::vector<Message> take_messages() { return ranks_.take_messages(); }

  private:
    struct Parameter {
        at::Tensor tensor, place;  // place: of its gradient in the unit's
        at::Tensor piece, piece_gradient;
        std::size_t unit = 0;
        std::int64_t start = 0;  // in the unit
        bool filled = false;
    };
    struct Unit {
        at::Tensor weights, gradients;  // flat, as long as n runs
        std::size_t members, missing;
        Ranks::Pending pending;
    };

    void make_unit(const std::vector<std::int64_t>& members);
    at::Tensor run(const at::Tensor& whole) const;
    void ready(std::size_t index);
    void launch();

    Ranks ranks_;
    std::vector<Parameter> parameters_;
    std::vector<Unit> units_;
    std::size_t launched_ = 0;
    bool synchronising_ = true;
    std::mutex mutex_;                    // autograd has a thread for each device
    std::optional<GradientHooks> hooks_;  // the last member: gone before what they change
};

}  // namespace fived
