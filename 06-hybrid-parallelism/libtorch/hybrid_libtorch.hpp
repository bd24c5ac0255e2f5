// Five strategies on one model, on LibTorch: hybrid_model.py in C++. Each chapter's piece knows its own axis alone; here they
// stand together, and the work after the backward pass follows from the placement of each parameter.
//
//     tp   columns, rows, vocabulary; a slice of each expert      tp_libtorch      dp   gradients, ZeRO-1's shards    zero1
//     sp   ring attention                                         sp_libtorch      pp   stages, run by a list         pp_libtorch
//     ep   whole experts, to which tokens travel                  ep_libtorch
//
//     Mesh mesh(shape, rank, make_group);
//     Hybrid hybrid(model, mesh, layout, at::kDouble, values);     // this rank's part of the model
//     optimizer of what lies in hybrid.parameters()
//     const at::Tensor loss = hybrid.step(tokens_BS, targets_BS);  // forward, backward, sums over ranks
//     hybrid.clip(1);
//     optimizer.step(), hybrid.stepped();
//
// Every mesh runs as a pipeline. Without pp it has one stage, whose list is forward and backward in turn.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "placement.hpp"
#include "pp_libtorch.hpp"
#include "transformer.hpp"
#include "zero1.hpp"

namespace fived {

/// How each axis is used. The mesh has their sizes.
struct Layout {
    Schedule schedule;  ///< for the ranks along pp
    Order order = Order::zigzag;
    Kernel kernel = Kernel::library;
    bool sequence_parallel = false;  ///< Megatron's, over tp
    bool zero = false;               ///< ZeRO-1, over all ranks that hold a parameter
};

/// Where a parameter of the plain model lies: the table of placement.hpp.
Placement place(const std::string& name, at::IntArrayRef sizes, const Shape& shape, Mesh& mesh,
                bool sequence_parallel);

class Hybrid {
  public:
    /// value(name, sizes) of each parameter of the plain model.
    using Whole = std::function<at::Tensor(const std::string& name, at::IntArrayRef sizes)>;

    /// Collective; all ranks give the same arguments. Throws std::invalid_argument as the chapters' pieces do.
    Hybrid(const Shape& shape, Mesh& mesh, const Layout& layout, at::ScalarType dtype, const Whole& whole);
    Hybrid(const Hybrid&) = delete;
    Hybrid& operator=(const Hybrid&) = delete;

    /// What this rank's optimizer steps on: its parameters, or with ZeRO its piece of each.
    const std::vector<Placed>& parameters() const { return zero_.empty() ? placed_ : pieces_; }

    /// Leaves the gradients of the global batch; returns its loss, the same on all ranks. tokens_BS, targets_BS: the samples of
    /// this rank's place along dp and ep, the same along pp, sp and tp; at least one for each micro-batch. Collective.
    at::Tensor step(const at::Tensor& tokens_BS, const at::Tensor& targets_BS);
    /// clip_gradients of them.
    double clip(double largest) { return clip_gradients(parameters(), mesh_, largest); }
    /// After the optimizer's step. Collective with ZeRO.
    void stepped();

    /// What was sent since the last call, by axes.
    std::vector<Mesh::Sent> take_messages();
    /// What fell on each expert, in each pass of the last step.
    const std::vector<at::Tensor>& counts() const { return transformer_.counts; }
    /// Rows of the last step that went to other ranks' experts or came from other ranks.
    std::int64_t rows_moved() const { return transformer_.moved; }
    /// Parameters that ZeRO shards together, over the ranks along `axes`.
    struct Unit {
        Axes axes;
        std::int64_t length, members;  ///< numbers, with the padding; parameters
    };
    const std::vector<Unit>& units() const { return units_; }

  private:
    void make_groups() const;
    void fill(at::ScalarType dtype, const Whole& whole);
    void shard();
    void finish();

    Shape shape_;
    Mesh& mesh_;
    Layout layout_;
    Transformer transformer_;
    std::vector<Placed> placed_, pieces_;
    std::vector<std::unique_ptr<Zero1>> zero_;
    std::vector<Unit> units_;
    std::unique_ptr<Executor> executor_;
};

}  // namespace fived
