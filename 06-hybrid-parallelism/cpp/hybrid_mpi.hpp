// GPT-2, with experts or without, trained on a mesh of pp x dp x ep x sp x tp ranks, by MPI alone: this rank's part of the
// model, and its step.
//
//                 pp              dp           ep                           sp         tp
//     tokens      pass all        split        split                        split      the same
//     weights     of a stage      whole        whole, but of experts some   whole      split (norms whole)
//     gradients   complete        sum          sum, of experts complete     sum        complete; of routers, sum
//     messages    point to point  all-reduce   all-to-all, all-reduce       ring       all-reduce
//
//     hybrid_mesh.hpp        the axes as a Cartesian communicator    hybrid_parameters.hpp   who has which part; the one rule
//     hybrid_attention.hpp   ring attention of chapter 04 over sp    hybrid_mixture.hpp      experts of chapter 05 over ep
//     hybrid_ends.hpp        embedding, head, loss                   hybrid_block.hpp        a layer, split over tp
//     hybrid_stage.hpp       layers of a rank along pp
//
// Every mesh runs as a pipeline (pp_runner.hpp of chapter 02); without pp it has one stage.
//
// The loss is a sum over the tokens of the whole global batch, divided by the number of its targets: not a mean of means.
//
// B samples  S sequence  s this rank's part of it  D width
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "fived/math/schedule.hpp"
#include "hybrid_stage.hpp"
#include "pp_runner.hpp"

namespace fived {

template <class T>
class Hybrid {
  public:
    /// `mesh` must outlive this. Throws std::invalid_argument where the shape does not fit the mesh or the schedule.
    /// Collective.
    Hybrid(const ModelShape& shape, const Mesh& mesh, Schedule schedule, std::size_t sequence, Order order,
           std::uint64_t seed);
    Hybrid(const Hybrid&) = delete;

    /// The loss of the global batch, and its gradients. tokens_BS, targets_BS: the samples of this rank's place along dp
    /// and ep, the same on all ranks along pp, sp and tp. Collective.
    double loss_and_gradients(MatrixView<const std::int64_t> tokens_BS,
                              MatrixView<const std::int64_t> targets_BS);
    /// Of the whole model, after loss_and_gradients. Collective.
    double gradient_norm() { return parameters_.gradient_norm(mesh_); }
    template <class Optimizer>
    void step(Optimizer& optimizer) {
        optimizer.step(weights(), std::span<const T>(gradients()));
    }

    const ModelShape& shape() const { return shape_; }
    const Mesh& mesh() const { return mesh_; }
    const Schedule& schedule() const { return runner_.schedule(); }
    /// This rank's parts, under the names of the plain model.
    std::span<const Placed> parameters() const { return parameters_.all(); }
    std::span<T> weights() { return parameters_.weights(); }
    std::span<T> gradients() { return parameters_.gradients(); }
    /// Rows of the last step that went to other ranks' experts or came from other ranks for this rank's.
    std::optional<std::int64_t> rows_moved() const { return rows_moved_; }

  private:
    friend class ScheduleRunner<T>;
    using Buffer = typename Buffers<T>::Buffer;

    void check() const;
    void cut_batch(MatrixView<const std::int64_t> tokens_BS, MatrixView<const std::int64_t> targets_BS);
    Buffer forward(const Instruction& i, Buffer x);
    Buffer backward_input(const Instruction& i, Buffer dy);
    void backward_weights(const Instruction& i);
    std::size_t numbers(const Instruction& i) const { return micro_[i.micro].size() * shape_.width; }
    MatrixView<T> view(const Buffer& buffer, int micro) const {
        return {buffer.get(), micro_[micro].size(), shape_.width};
    }

    ModelShape shape_;
    const Mesh& mesh_;
    std::vector<Chunk> chunks_;  // this rank's positions
    std::size_t sequence_;
    ScheduleRunner<T> runner_;
    Buffers<T> buffers_;
    Parameters<T> parameters_;
    Workspace<T> workspace_;
    std::optional<Embedding<T>> embedding_;
    std::optional<Communicator> holders_;  // of the embedding, where that are two ranks
    std::map<int, Stage<T>> stages_;
    std::vector<MicroBatch> micro_;
    double loss_ = 0, scale_ = 0;
    std::optional<std::int64_t> rows_moved_;  // none before the first step
};

}  // namespace fived
