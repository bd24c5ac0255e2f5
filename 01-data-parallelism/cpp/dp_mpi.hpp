// Data parallelism by MPI: every rank holds the whole model and a part of the batch; gradients are summed.
//
//     d loss / d w  =  sum over ranks ( sum of d loss_i / d w over the rank's samples / samples of the GLOBAL batch )
//
//     backward, last layer first:   dW3 ──► dX3 ──► dW2 ──► dX2 ──► dW1          time ─►
//     flat gradient array:         [ dW3 db3 | dW2 db2 | dW1 db1 ]   finished from the left
//     buckets on the wire:               [ bucket 0 ][ bucket 1 ][ rest ]        then the optimizer
//
// The strategy (dp_mpi_exchange.hpp) says how the sums come about and which of them a rank gets. With G bytes of gradients
// on n ranks a rank sends per step
//
//     all-reduce   2 (n-1)/n G             all sums on all ranks; every rank steps with all weights
//     ZeRO-1       2 (n-1)/n G             the sums of its piece, its state and its step; then the weights are gathered
//     top-k        (n-1) k (4 + bytes)     the k largest with their places, from all ranks; every rank steps with all
//
// Beside these, rank 0's weights are broadcast once at the start, and a step sums the loss, one number.
//
// Ranks may have different numbers of samples: the loss is divided by those of the global batch, on every rank.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dp_mpi_exchange.hpp"
#include "fived/lesson/record.hpp"
#include "fived/math/mlp.hpp"
#include "fived/math/optimizer.hpp"

namespace fived {

/// An MLP on every rank of `comm` that computes what one MLP would on the whole batch. comm = null: serial.
/// T: float or double, for which dp_mpi.cpp makes it; another type needs its type and sum in fived/math/dtype.hpp.
template <class T>
class DataParallelMlp {
  public:
    /// Collective: rank 0's weights are broadcast. `comm` must outlive this.
    DataParallelMlp(const std::vector<int>& sizes, std::uint64_t seed, const Communicator* comm,
                    const Strategy& how = {});

    /// Loss and gradients of the global batch of `global_count` samples, of which x_BI, y_B are this rank's;
    /// the local sizes may differ. The rows are worked off in `micro_batches` parts; only the last
    /// communicates, and then the accumulated gradient. Returns the global loss.
    double loss_and_gradients(MatrixView<const T> x_BI, std::span<const std::uint8_t> y_B,
                              std::size_t global_count, std::size_t micro_batches = 1);
    /// 2-norm of all gradients; collective with ZeRO-1, where a rank has the sums of its piece alone.
    double gradient_norm();
    /// Updates the weights that this rank owns, then gathers those of the others. The optimizer makes its state as long
    /// as the weights it is given: with ZeRO-1 those of a piece. Any type with step(weights, gradients) will do
    /// (fived/math/optimizer.hpp).
    template <class Optimizer>
    void step(Optimizer& optimizer) {
        optimizer.step(owned(mlp_.weights()), std::span<const T>(owned(mlp_.gradients())));
        if (exchange_) in_mpi([&] { exchange_->gather(mlp_.weights()); });
    }

    Mlp<T>& mlp() { return mlp_; }
    /// Collective: all gradients on all ranks, for those who want to look; training does not need it.
    std::span<T> gather_gradients();
    /// Bytes of gradients and weights that this rank sent, and its seconds inside MPI for them that no computing hid,
    /// since loss_and_gradients was last called; without the loss and the norm, a number each.
    std::size_t bytes_sent() const { return exchange_ ? exchange_->bytes_sent : 0; }
    double exposed_seconds() const { return exposed_seconds_; }

  private:
    std::span<T> owned(std::span<T> flat) const { return exchange_ ? exchange_->owned(flat) : flat; }
    template <class Action>
    void in_mpi(Action action) {
        const Timer timer;
        action();
        exposed_seconds_ += timer.seconds();
    }

    Mlp<T> mlp_;
    const Communicator* comm_;
    std::unique_ptr<Exchange<T>> exchange_;  // none when serial
    double exposed_seconds_ = 0;
};

}  // namespace fived
