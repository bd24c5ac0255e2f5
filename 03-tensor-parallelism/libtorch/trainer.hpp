// A model in training: split over the ranks of a process group, or on one device.
#pragma once

#include <torch/all.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpt2.hpp"
#include "settings.hpp"

namespace fived {

class Trainer {
  public:
    Trainer(const Settings& settings, const Text& text, const std::string& optimizer, RanksPtr ranks)
        : settings_(settings), text_(text), gpt2_(settings.shape()), ranks_(std::move(ranks)) {
        mine_ = split(gpt2_.initial(settings.seed, settings.type()), *ranks_);
        Tensors leaves;
        for (const auto& [_, tensor] : mine_) leaves.push_back(tensor);
        if (optimizer == "sgd")
            optimizer_ = std::make_unique<torch::optim::SGD>(leaves, torch::optim::SGDOptions(0.1));
        else
            optimizer_ =
                std::make_unique<torch::optim::AdamW>(leaves, torch::optim::AdamWOptions(1e-3).eps(1e-5));
    }

    /// Leaves the gradients of the step's batch; returns its loss. Collective.
    double backward(int step) {
        optimizer_->zero_grad();
        double loss = 0;
        for (int m = 0; m < settings_.micro_batches; ++m) {
            const std::size_t begin = cut(settings_.batch, settings_.micro_batches, m);
            const std::size_t B = cut(settings_.batch, settings_.micro_batches, m + 1) - begin;
            const std::size_t S = std::size_t(settings_.sequence);
            const at::Tensor tokens_BS = at::empty({std::int64_t(B), std::int64_t(S)}, at::kLong);
            const at::Tensor targets_BS = at::empty_like(tokens_BS);
            const auto view = [&](const at::Tensor& t) {
                return MatrixView<std::int64_t>(t.data_ptr<std::int64_t>(), B, S);
            };
            lm_samples(text_.train, settings_.seed, step, begin, view(tokens_BS), view(targets_BS));
            const at::Tensor logits_BSv = gpt2_.forward(tokens_BS, mine_, ranks_);
            const at::Tensor part =
                cross_entropy_sum(logits_BSv, targets_BS, vocabulary, ranks_).first / settings_.tokens();
            part.backward();
            loss += part.item<double>();
        }
        return loss;
    }
    void update() { optimizer_->step(); }
    const Parameters& parameters() const { return mine_; }
    std::vector<Message> take_messages() { return ranks_->take_messages(); }

  private:
    const Settings& settings_;
    const Text& text_;
    Gpt2 gpt2_;
    RanksPtr ranks_;
    Parameters mine_;
    std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace fived
