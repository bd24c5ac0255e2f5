// Pipeline parallelism by MPI: a rank has some layers; micro-batches pass all ranks forward and back.
//
//     rank 0   0 1 . . a a 2 b b 3 c c . d d      1F1B, 2 ranks, 4 micro-batches: a digit is a forward, two letters a
//     rank 1   . 0 a a 1 b b 2 c c 3 d d . .      backward, which takes twice the time, a dot a wait
//
// What a rank does, in order, is a list that Python made (fived/math/schedule.hpp); this file runs it, whatever it is.
// Another schedule is another list (`pp_mpi --list FILE`), and changes nothing here.
//
// A rank holds the layers of its stages (Schedule::owner), their gradients and optimizer state, and the activations of each
// micro-batch from its forward to the backward of its weights: of all M with GPipe, of p - r at most with 1F1B on rank r.
// A message is the activations of one micro-batch [rows, width] where two stages meet, or the gradient of these; weights
// and their gradients are never sent. Sends and receives start at once, and a rank waits only for what it computes with.
// Two ranks match messages by order: a rank receives in the order in which its peer sends. After the last instruction the
// loss is summed over all ranks.
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

#include "fived/lesson/record.hpp"
#include "fived/math/optimizer.hpp"
#include "fived/math/schedule.hpp"
#include "fived/mpi/mpi.hpp"
#include "pp_stages.hpp"

namespace fived {

/// Bytes of a piece of a message: so few that MPI takes them at once. Longer ones wait until the receiver says where to
/// put them, and then for the sender to be inside MPI again, some tens of kilobytes at a time, and here both are busy.
inline std::size_t message_piece = 4000;

/// A computation and when it ran, in seconds since loss_and_gradients was called.
struct Event {
    Instruction instruction;
    double start, end;
};

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

    const Schedule& schedule() const { return schedule_; }
    /// Of this rank's layers, under their names in the whole model.
    std::span<const Parameter> parameters() const { return stages_.parameters(); }
    std::span<T> weights() { return stages_.weights(); }
    std::span<T> gradients() { return stages_.gradients(); }
    /// Operations of a sample in the whole model.
    double flop_per_sample() const { return stages_.flop_per_sample(); }
    /// Bytes this rank sent, and its seconds blocked in MPI, in the last loss_and_gradients.
    std::size_t bytes_sent() const { return bytes_sent_; }
    double blocked_seconds() const { return blocked_seconds_; }
    std::size_t bytes_by_formula(std::size_t batch) const;
    /// Of activations and messages, the most at once.
    std::size_t buffer_bytes() const { return buffers_.bytes(); }
    std::span<const Event> events() const { return events_; }

  private:
    using Buffer = typename Buffers<T>::Buffer;
    struct Moving {
        Buffer buffer;
        std::vector<Request> pieces;  // none for what stays on the rank
    };

    std::vector<bool> mine() const;
    std::pair<std::size_t, std::size_t> rows(int micro) const;
    void compute(const Instruction& i);
    Buffer forward(const Instruction& i, Buffer x);
    Buffer backward(const Instruction& i, Buffer dy);
    void weights_backward(const Instruction& i);
    void send(const Instruction& i);
    void receive(const Instruction& i);
    Buffer read(const Instruction& i);
    void wait(Moving& moving);
    bool test(Moving& moving);
    void progress();
    std::vector<std::span<T>> pieces(const Instruction& i, const Buffer& buffer) const;

    const Communicator& comm_;
    Schedule schedule_;
    Buffers<T> buffers_;
    MlpStages<T> stages_;
    MatrixView<const T> x_BI_;
    std::span<const std::uint8_t> y_B_;
    std::map<std::pair<int, int>, Kept<T>> kept_;  // by stage and micro-batch
    std::map<Instruction, Moving> arriving_;       // by the receive
    std::map<Instruction, Buffer> made_;           // by the send
    std::vector<Moving> leaving_;
    std::vector<bool> written_;  // of each stage: whether its weights have gradients in this step
    std::vector<Event> events_;
    Timer clock_;
    double loss_ = 0, blocked_seconds_ = 0;
    std::size_t bytes_sent_ = 0;
};

}  // namespace fived
