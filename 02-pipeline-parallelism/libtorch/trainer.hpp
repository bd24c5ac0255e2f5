// A model in training: in a pipeline, or whole on one device.
#pragma once

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fived/torch/parameters.hpp"
#include "pp_libtorch.hpp"
#include "settings.hpp"

namespace fived {

class Trainer {
  public:
    /// On one device.
    Trainer(const Settings& settings, OptimizerKind optimizer) : settings_(settings) {
        whole_ = Gpt2Part(settings.shape());
        whole_->to(settings.type());
        whole_->initialise(settings.seed);
        for (const auto& item : whole_->named_parameters()) parameters_.emplace(item.key(), item.value());
        start(optimizer);
    }
    /// In a pipeline.
    Trainer(const Settings& settings, OptimizerKind optimizer, const Schedule& schedule, const RanksPtr& up,
            const RanksPtr& down)
        : settings_(settings), micro_batches_(schedule.micro_batches) {
        pipeline_.emplace(settings.shape(), schedule, up, down, settings.type());
        pipeline_->fill([&](const std::string& name, at::IntArrayRef sizes) {
            return initial_value(name, sizes, settings.shape().layers, settings.seed);
        });
        parameters_ = pipeline_->parameters();
        start(optimizer);
    }

    /// Leaves the gradients of the step's batch; returns its loss. In a pipeline collective.
    double backward(int step) {
        optimizer_->zero_grad();
        std::vector<Part> parts;
        for (int m = 0; m < micro_batches_; ++m)
            parts.push_back(lm_batch(settings_.text, settings_.seed, step,
                                     cut(settings_.batch, micro_batches_, m),
                                     cut(settings_.batch, micro_batches_, m + 1), settings_.sequence));
        if (pipeline_)
            return pipeline_->run(parts, 1 / settings_.targets()).item<double>() / settings_.targets();
        const auto& [tokens_BS, targets_BS] = parts[0];
        const at::Tensor loss =
            at::cross_entropy_loss(whole_(tokens_BS).flatten(0, -2), targets_BS.flatten());
        loss.backward();
        return loss.item<double>();
    }
    /// Of this rank's gradients, each of which counts once in the sum over ranks.
    double squares() const {
        double sum = 0;
        for (const auto& [name, tensor] : parameters_)
            if (!pipeline_ || pipeline_->counts(name))
                sum += tensor.grad().to(at::kDouble).square().sum().item<double>();
        return sum;
    }
    void update() { optimizer_->step(); }
    /// This rank's.
    const Parameters& parameters() const { return parameters_; }
    std::vector<Message> take_messages() { return pipeline_->take_messages(); }

  private:
    void start(OptimizerKind optimizer) {
        Tensors leaves;
        for (const auto& [_, tensor] : parameters_) leaves.push_back(tensor);
        optimizer_ = make_optimizer(optimizer, leaves);
    }

    const Settings& settings_;
    int micro_batches_ = 1;
    Gpt2Part whole_{nullptr};
    std::optional<Pipeline> pipeline_;
    Parameters parameters_;
    std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace fived
