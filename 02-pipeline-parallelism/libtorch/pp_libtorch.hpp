// Pipeline parallelism on LibTorch: every rank holds some stages of GPT-2 and runs its list of instructions, which is that
// of Python (pp_schedule.py): GPipe, 1F1B, interleaved and zero-bubble are lists, and this file knows none of them.
//
//     rank 0 | embed  layers.0  layers.1 |  ── x_BSD ──►  rank 1 | layers.2  layers.3  norm  head |  loss
//                                         ◄── dx_BSD ──
//
// Between its forward and its backward a stage keeps of a micro-batch its input, and an edge into autograd's graph for its
// output. Nobody waits for a send: a message that comes later shows that it was received (settled).
//
// Messages to higher ranks go through one process group and those to lower ranks through another: a library may carry out
// the messages of a group in order, and the two directions must not wait for each other.
//
// Cost of a step: a rank sends B S D numbers for each side on which a stage has a neighbour on another rank; the first rank
// and the last also the gradient of the embedding, which both hold; the sum of the loss is one number.
//
//     Pipeline pipe(shape, schedule, up, down, at::kDouble);      // this rank's part of the model
//     pipe.fill(value);                                           // value(name, sizes) of each parameter
//     const at::Tensor loss = pipe.run(parts, 1. / tokens);       // forward and backward of all micro-batches
//
// The loss is divided once, by the tokens of the whole batch: `scale`. So micro-batches may differ in size.
//
// B batch  S sequence  D width
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fived/math/schedule.hpp"
#include "fived/torch/deferred.hpp"
#include "fived/torch/gpt2.hpp"
#include "fived/torch/ranks.hpp"
#include "fived/torch/torch.hpp"

namespace fived {

/// x w^T whose gradient of w may wait. x [..., in], weight [out, in]; weight is a leaf.
at::Tensor deferred_product(const at::Tensor& x, const at::Tensor& weight, const DeferredPtr& deferred);

/// For each receive of a rank: the sends that are over when it has come, for their receiver had used them before. So buffers
/// are given back without a wait; what nothing shows is over at the end.
std::map<Instruction, std::vector<Instruction>> settled(const Schedule& schedule, int rank);

/// First layer of a stage; of stage `stages`, the end. Numbers differ by one at the most, the longer stages first.
int first_layer(int layers, int stages, int stage);

/// A micro-batch: tokens_BS and targets_BS.
using Part = std::pair<at::Tensor, at::Tensor>;

/// The runtime of one rank.
class Executor {
  public:
    using Stage = std::function<at::Tensor(const at::Tensor& x)>;
    using Loss = std::function<at::Tensor(const at::Tensor& y, const at::Tensor& targets_BS)>;

    using Between = std::function<std::vector<std::int64_t>(const at::Tensor& tokens_BS)>;

    /// stages: this rank's, by number. between: sizes of what passes from stage to stage.
    Executor(const Schedule& schedule, std::map<int, Stage> stages, Loss loss, RanksPtr up, RanksPtr down,
             Between between, const at::TensorOptions& options, DeferredPtr deferred);

    /// Forward and backward of all micro-batches; the sum of their losses, on all ranks. scale: what is back-propagated is the
    /// losses times this. Collective. Throws std::invalid_argument where parts are not as many as the schedule's.
    at::Tensor run(const std::vector<Part>& parts, double scale);

  private:
    struct Travelling {
        at::Tensor x;
        Ranks::Pending pending;
    };
    using Place = std::pair<int, int>;  // stage, micro-batch

    void compute(const Instruction& i);
    at::Tensor forward(const Instruction& i, at::Tensor x);
    at::Tensor backward(const Instruction& i, const at::Tensor& dy);
    at::Tensor read(const Instruction& i);
    void send(const Instruction& i);
    void receive(const Instruction& i);
    Ranks& way(const Instruction& i) const;

    Schedule schedule_;
    std::map<int, Stage> stages_;
    Loss loss_;
    RanksPtr up_, down_;
    Between between_;
    at::TensorOptions options_;
    DeferredPtr deferred_;
    std::map<Instruction, std::vector<Instruction>> settled_;

    // of a run
    std::vector<Part> parts_;
    double scale_ = 1;
    at::Tensor total_;
    std::map<Instruction, at::Tensor> here_;  // made on this rank, to be sent or read here; by the send
    std::map<Instruction, Travelling> arriving_, leaving_;
    std::map<Place, at::Tensor> inputs_;
    std::map<Place, torch::autograd::Edge> outputs_;
    std::map<Place, std::vector<Deferred::Work>> put_off_;
};

/// GPT-2 in stages of consecutive layers, whose numbers differ by one at the most, the longer stages first.
class Pipeline {
  public:
    /// up and down: the same ranks, in two groups. Throws std::invalid_argument for a schedule of other ranks, or of more stages
    /// than there are layers.
    Pipeline(const Gpt2Shape& shape, const Schedule& schedule, RanksPtr up, RanksPtr down,
             const at::TensorOptions& options);

    /// value(name, sizes) of each of this rank's parameters.
    template <class Value>
    void fill(Value value) {
        for (auto& [_, stage] : stages_) stage->fill(value);
    }
    /// This rank's, under their names in the whole model.
    std::map<std::string, at::Tensor> parameters() const;
    /// Whether this rank counts the parameter of that name, which two may hold, in a sum over all parameters.
    bool counts(const std::string& name) const { return !(holds_copy_ && name == "embed_tokens.weight"); }

    /// Forward and backward of all micro-batches, as Executor::run; then the gradient of what two ranks hold, summed.
    at::Tensor run(const std::vector<Part>& parts, double scale);
    /// What was sent since the last call.
    std::vector<Message> take_messages();

  private:
    RanksPtr up_, down_;
    std::map<int, Gpt2Part> stages_;
    int tied_with_ = -1;  // the rank that holds the embedding, too
    bool holds_copy_ = false;
    std::unique_ptr<Executor> executor_;
};

}  // namespace fived
