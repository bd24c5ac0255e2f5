// A model in training: split over the ranks of a process group, or on one device.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpt2.hpp"
#include "settings.hpp"

namespace fived {

class Trainer {
  public:
    Trainer(const Settings& settings, OptimizerKind optimizer, RanksPtr ranks)
        : settings_(settings), gpt2_(settings.shape()), ranks_(std::move(ranks)) {
        mine_ = split(gpt2_.initial(settings.seed, settings.type()), *ranks_);
        Tensors leaves;
        for (const auto& [_, tensor] : mine_) leaves.push_back(tensor);
        optimizer_ = make_optimizer(optimizer, leaves);
    }

    /// Leaves the gradients of the step's batch; returns its loss. Collective.
    double backward(int step) {
        optimizer_->zero_grad();
        double loss = 0;
        for (int m = 0; m < settings_.micro_batches; ++m) {
            const auto [tokens_BS, targets_BS] = lm_batch(
                settings_.text, settings_.seed, step, cut(settings_.batch, settings_.micro_batches, m),
                cut(settings_.batch, settings_.micro_batches, m + 1), settings_.sequence);
            const at::Tensor logits_BSv = gpt2_.forward(tokens_BS, mine_, ranks_);
            const at::Tensor part =
                cross_entropy_sum(logits_BSv, targets_BS, vocabulary, ranks_).first / settings_.targets();
            part.backward();
            loss += part.item<double>();
        }
        return loss;
    }
    /// Of this rank's gradients; what is whole on all ranks counts on the first.
    double squares() const {
        double sum = 0;
        for (const auto& [name, tensor] : mine_)
            if (split_dimension(name) >= 0 || ranks_->rank() == 0)
                sum += tensor.grad().to(at::kDouble).square().sum().item<double>();
        return sum;
    }
    void update() { optimizer_->step(); }
    const Parameters& parameters() const { return mine_; }
    std::vector<Message> take_messages() { return ranks_->take_messages(); }

  private:
    const Settings& settings_;
    Gpt2 gpt2_;
    RanksPtr ranks_;
    Parameters mine_;
    std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace fived
