// GPT-2 with a mixture of experts in every layer, in training: its experts over the ranks, or on one device.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ep_libtorch.hpp"
#include "fived/torch/gpt2.hpp"
#include "settings.hpp"

namespace fived {

/// MoE of common/models/moe.py, with this rank's experts.
class Mixture : public FeedForward {
  public:
    Mixture(const Settings& s, int D, RanksPtr ranks)
        : k_(s.experts_per_token), weights_(s.router), ranks_(std::move(ranks)) {
        const std::int64_t e = experts_of(s.experts, ranks_->size(), ranks_->rank()), F = s.mlp_width();
        const auto experts = register_module("experts", std::make_shared<torch::nn::Module>());
        const auto add = [&](torch::nn::Module& module, const std::string& name,
                             std::vector<std::int64_t> weight, std::vector<std::int64_t> bias) {
            const auto part = module.register_module(name, std::make_shared<torch::nn::Module>());
            part->register_parameter("weight", at::empty(weight));
            if (!bias.empty()) part->register_parameter("bias", at::empty(bias));
        };
        add(*this, "router", {s.experts, D}, {});
        add(*experts, "up_proj", {e, F, D}, {e, F});
        add(*experts, "down_proj", {e, D, F}, {e, D});
        for (const auto& item : named_parameters()) mine_.emplace(item.key(), item.value());
    }
    at::Tensor forward(const at::Tensor& x_BSD) override {
        return mixture(x_BSD, mine_, "", k_, weights_, ranks_, &counts_);
    }
    /// What fell on each expert of this rank's tokens, in each pass since the last call.
    std::vector<at::Tensor> take_counts() { return std::exchange(counts_, {}); }

  private:
    int k_;
    Weights weights_;
    RanksPtr ranks_;
    Parameters mine_;
    std::vector<at::Tensor> counts_;
};

class Trainer {
  public:
    Trainer(const Settings& settings, OptimizerKind optimizer, RanksPtr ranks)
        : settings_(settings), ranks_(std::move(ranks)), model_(settings.shape(), [this](int D) {
              mixtures_.push_back(std::make_shared<Mixture>(settings_, D, ranks_));
              return mixtures_.back();
          }) {
        model_->to(settings.type());
        model_->fill([&](const std::string& name, at::IntArrayRef sizes) {
            std::vector<std::int64_t> whole = sizes.vec();
            if (is_expert(name)) whole[0] = settings_.experts;
            return piece_of(initial_value(name, whole, settings_.shape().layers, settings_.seed), name,
                            *ranks_);
        });
        for (const auto& item : model_->named_parameters()) parameters_.emplace(item.key(), item.value());
        optimizer_ = make_optimizer(optimizer, model_->parameters());
    }

    /// Leaves the gradients of the step's batch, of which this rank has a part; returns the loss of all. Collective.
    double backward(int step) {
        optimizer_->zero_grad();
        take_counts();
        const std::size_t B = std::size_t(settings_.batch), n = ranks_->size(), r = ranks_->rank();
        const std::size_t begin = cut(B, n, r), mine = cut(B, n, r + 1) - begin;
        const std::size_t parts = n == 1 ? 1 : std::size_t(settings_.micro_batches);
        const at::Tensor loss = at::zeros({}, settings_.type());
        for (std::size_t m = 0; m < parts; ++m) {
            const auto [tokens_BS, targets_BS] =
                lm_batch(settings_.text, settings_.seed, step, begin + cut(mine, parts, m),
                         begin + cut(mine, parts, m + 1), settings_.sequence);
            const at::Tensor part = at::cross_entropy_loss(model_(tokens_BS).flatten(0, -2),
                                                           targets_BS.flatten(), {}, at::Reduction::Sum) /
                                    settings_.targets();
            part.backward();
            loss.add_(part.detach());
        }
        sum_gradients(parameters_, *ranks_);
        Ranks::Pending pending = ranks_->all_reduce(loss);
        ranks_->wait(pending);
        return loss.item<double>();
    }
    /// Of this rank's gradients; what all ranks hold counts on the first.
    double squares() const {
        double sum = 0;
        for (const auto& [name, tensor] : parameters_)
            if (is_expert(name) || ranks_->rank() == 0)
                sum += tensor.grad().to(at::kDouble).square().sum().item<double>();
        return sum;
    }
    void update() { optimizer_->step(); }
    const Parameters& parameters() const { return parameters_; }
    std::vector<Message> take_messages() { return ranks_->take_messages(); }
    /// Of every pass and layer of the last step.
    std::vector<at::Tensor> take_counts() {
        std::vector<at::Tensor> all;
        for (const auto& mixture : mixtures_)
            for (at::Tensor& counts_E : mixture->take_counts()) all.push_back(std::move(counts_E));
        return all;
    }

  private:
    const Settings& settings_;
    RanksPtr ranks_;
    std::vector<std::shared_ptr<Mixture>> mixtures_;
    Gpt2Part model_;
    Parameters parameters_;
    std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace fived
