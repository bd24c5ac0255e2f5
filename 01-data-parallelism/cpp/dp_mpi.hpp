// Data parallelism by MPI: every rank holds the whole model and a part of the batch; gradients are summed.
//
//     d loss / d w  =  sum over ranks ( sum over the rank's samples / number of samples of the GLOBAL batch )
//
//     backward, last layer first:   dW3 ──► dX3 ──► dW2 ──► dX2 ──► dW1          time ─►
//     flat gradient array:         [ dW3 db3 | dW2 db2 | dW1 db1 ]   finished from the left
//     buckets on the wire:               [ bucket 0 ][ bucket 1 ][ rest ]        then the optimizer
//
// Cost, ring all-reduce: a rank sends 2 (P-1)/P bytes a byte of gradient, whatever the batch is.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "fived/collectives.hpp"
#include "fived/mlp.hpp"
#include "fived/optimizer.hpp"

namespace fived {

/// Sums a flat array over the ranks, bucket by bucket, while its rest is still being computed.
template <class T>
class GradientBuckets {
  public:
    GradientBuckets(const Communicator& comm, std::span<T> gradients, std::size_t bucket_bytes);

    /// The first `finished` gradients are final here: starts MPI_Iallreduce on every bucket that is full, and
    /// lets MPI move those under way (it does so only inside its calls, hence MPI_Test between the matrix
    /// products).
    void advance(std::size_t finished);
    /// Returns when all gradients are sums over the ranks.
    void wait();
    /// Seconds spent inside MPI since the last call: what the overlap did not hide.
    double take_exposed_seconds();

  private:
    const Communicator& comm_;
    std::span<T> gradients_;
    std::size_t bucket_, started_ = 0;
    std::vector<Request> pending_;
    double exposed_seconds_ = 0;
};

enum class Reduction { overlapped, ring };

/// An MLP on every rank of `comm` that computes what one MLP would on the whole batch. comm = null: serial.
template <class T>
class DataParallelMlp {
  public:
    /// Collective: rank 0's weights are broadcast. `comm` must outlive this. `bucket_bytes` >= sizeof(T).
    DataParallelMlp(const std::vector<int>& sizes, std::uint64_t seed, const Communicator* comm,
                    std::size_t bucket_bytes, Reduction reduction = Reduction::overlapped);

    /// Loss and gradients of the global batch of `global_count` samples, of which x_BI, y_B are this rank's;
    /// the local sizes may differ. The rows are worked off in `micro_batches` parts; only the last
    /// communicates, and then the accumulated gradient. Returns the global loss.
    double loss_and_gradients(MatrixView<const T> x_BI, std::span<const std::uint8_t> y_B,
                              std::size_t global_count, std::size_t micro_batches = 1);
    /// 2-norm of all gradients. No communication: after loss_and_gradients they are the same on all ranks.
    double gradient_norm();
    template <class Optimizer>
    void step(Optimizer& optimizer) {
        optimizer.step(mlp_.weights(), std::span<const T>(mlp_.gradients()));
    }

    Mlp<T>& mlp() { return mlp_; }
    /// Bytes this rank sent for gradients in the last loss_and_gradients: counted message by message for the
    /// ring. What MPI_Iallreduce sends cannot be seen from outside; there it is the ring's formula.
    std::size_t bytes_sent() const { return bytes_sent_; }
    double exposed_seconds() const { return exposed_seconds_; }

  private:
    Mlp<T> mlp_;
    const Communicator* comm_;
    Reduction reduction_;
    std::optional<GradientBuckets<T>> buckets_;
    std::size_t bytes_sent_ = 0;
    double exposed_seconds_ = 0;
};

}  // namespace fived
