// Pipeline parallelism by MPI: a rank has some layers; micro-batches pass all ranks forward and back.
//
//     rank 0   0 1 . . a a 2 b b 3 c c . d d      1F1B, 2 ranks, 4 micro-batches: a digit is a forward, two letters a
//     rank 1   . 0 a a 1 b b 2 c c 3 d d . .      backward, which takes twice the time, a dot a wait
//
// What a rank does, in order, is a list that Python made (fived/math/schedule.hpp); pp_runner.hpp runs it, whatever it is.
// Another schedule is another list (`pp_mpi --list FILE`), and changes nothing here.
//
// A rank holds the layers of its stages (Schedule::owner), their gradients and optimizer state, and the activations of each
// micro-batch from its forward to the backward of its weights: of all M with GPipe, of p - r at most with 1F1B on rank r.
// A message is the activations of one micro-batch [rows, width] where two stages meet, or the gradient of these; weights
// and their gradients are never sent. Sends and receives start at once, and a rank waits only for what it computes with.
// After the last instruction the loss is summed over all ranks.
//
// Stages have equally many layers, give or take one: first_layer() of pp_stages.hpp. Micro-batches likewise: rows().
//
// Bytes a rank sends: for each side on which a stage has a neighbour on another rank, B x width x bytes of a number.
// Bubble: (p-1)/(M+p-1) of the time with GPipe and 1F1B, (p-1)/(3M+p-1) with zb-h1, (p-1)/(6M+p-1) with zb-v.
//
// p ranks  M micro-batches  B samples of a batch
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "fived/math/optimizer.hpp"
#include "fived/math/schedule.hpp"
#include "fived/mpi/mpi.hpp"
#include "pp_runner.hpp"
#include "pp_stages.hpp"

namespace fived {

/// An MLP in stages on the ranks of `comm` that computes what one MLP would.
template <class T>
class Pipeline {
  public:
    /// `comm` must outlive this. Throws std::invalid_argument where the schedule is for another number of ranks, or has
    /// more stages than there are layers.
    Pipeline(const std::vector<int>& sizes, std::uint64_t seed, const Communicator& comm, Schedule schedule);
    Pipeline(const Pipeline&) = delete;

    /// Loss and gradients of a batch, the same on every rank: the first stage reads x_BI, the last y_B. It is cut into
    /// the schedule's micro-batches, which differ by one sample at most. Collective.
    double loss_and_gradients(MatrixView<const T> x_BI, std::span<const std::uint8_t> y_B);
    /// 2-norm of all ranks' gradients. Collective.
    double gradient_norm();
    template <class Optimizer>
    void step(Optimizer& optimizer) {
        optimizer.step(weights(), std::span<const T>(gradients()));
    }

    const Schedule& schedule() const { return runner_.schedule(); }
    /// Of this rank's layers, under their names in the whole model.
    std::span<const Parameter> parameters() const { return stages_.parameters(); }
    std::span<T> weights() { return stages_.weights(); }
    std::span<T> gradients() { return stages_.gradients(); }
    /// Operations of a sample in the whole model.
    double flop_per_sample() const { return stages_.flop_per_sample(); }
    /// Bytes this rank sent, and its seconds blocked in MPI, in the last loss_and_gradients.
    std::size_t bytes_sent() const { return runner_.bytes_sent(); }
    double blocked_seconds() const { return runner_.blocked_seconds() + summing_seconds_; }
    std::size_t bytes_by_formula(std::size_t batch) const;
    /// Of activations and messages, the most at once.
    std::size_t buffer_bytes() const { return buffers_.bytes(); }
    std::span<const Event> events() const { return runner_.events(); }

  private:
    friend class ScheduleRunner<T>;
    using Buffer = typename Buffers<T>::Buffer;

    Buffer forward(const Instruction& i, Buffer x);
    Buffer backward_input(const Instruction& i, Buffer dy);
    void backward_weights(const Instruction& i);
    std::size_t numbers(const Instruction& i) const;
    std::pair<std::size_t, std::size_t> rows(int micro) const;

    const Communicator& comm_;
    ScheduleRunner<T> runner_;
    Buffers<T> buffers_;
    MlpStages<T> stages_;
    MatrixView<const T> x_BI_;
    std::span<const std::uint8_t> y_B_;
    std::map<std::pair<int, int>, Kept<T>> kept_;  // by stage and micro-batch
    std::vector<bool> written_;  // of each stage: whether its weights have gradients in this step
    double loss_ = 0, summing_seconds_ = 0;
};

}  // namespace fived
