// A model in training: on one device, or its batch split over the ranks of a process group.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dp_libtorch.hpp"
#include "fived/mpi/mpi.hpp"
#include "fived/torch/torch.hpp"
#include "models.hpp"
#include "zero1.hpp"

namespace fived {

enum class Way { one_device, all_reduce, zero1 };
constexpr auto names(Way) {
    return std::array{"one device", "all-reduce", "ZeRO-1"};
}

/// Samples and targets of this rank's micro-batches.
using Parts = std::vector<std::pair<at::Tensor, at::Tensor>>;

class Trainer {
  public:
    /// Collective, but for one device.
    Trainer(std::shared_ptr<Model> model, Way way, OptimizerKind optimizer, const Group& group,
            std::size_t bucket_bytes)
        : model_(std::move(model)) {
        for (auto& item : model_->named_parameters())
            names_.push_back(item.key()), tensors_.push_back(item.value());
        starts_.assign(tensors_.size(), 0);
        if (way == Way::all_reduce) dp_.emplace(tensors_, group, bucket_bytes);
        if (way == Way::zero1) {
            zero_.emplace(tensors_, group, bucket_bytes);
            tensors_ = zero_->pieces();
            const auto sizes = zero_->sizes();
            for (std::size_t i = 0; i < sizes.size(); ++i)
                for (int r = 0; r < group->getRank(); ++r) starts_[i] += sizes[i][r];
        }
        optimizer_ = make_optimizer(optimizer, tensors_);
    }

    /// Leaves the gradients of the whole global batch, of which `parts` are this rank's, and returns this rank's part of
    /// the loss. `global_targets`: of all ranks.
    double backward(const Parts& parts, double global_targets) {
        optimizer_->zero_grad();
        double sum = 0;
        for (std::size_t m = 0; m < parts.size(); ++m) {
            const bool last = m + 1 == parts.size();
            std::optional<NoSync> accumulate;
            if (!last && (dp_ || zero_))
                accumulate.emplace(dp_ ? dp_->synchronising() : zero_->synchronising());
            const auto& [x, y] = parts[m];
            const at::Tensor loss = at::cross_entropy_loss(model_->forward(x).flatten(0, -2), y.flatten(), {},
                                                           at::Reduction::Sum) /
                                    global_targets;
            loss.backward();
            sum += loss.item<double>();
        }
        if (dp_) dp_->finish();
        if (zero_) zero_->finish();
        return sum;
    }
    /// Of the whole gradient. Collective with ZeRO.
    double gradient_norm() {
        if (zero_) return zero_->gradient_norm();
        double squares = 0;
        for (const at::Tensor& t : tensors_)
            squares += t.grad().to(at::kDouble).square().sum().item<double>();
        return std::sqrt(squares);
    }
    void update() {
        optimizer_->step();
        if (zero_) zero_->gather();
    }

    const std::vector<std::string>& names() const { return names_; }
    /// What this rank's optimizer steps on: parameters, or with ZeRO the piece of each that begins at starts()[i].
    const Tensors& tensors() const { return tensors_; }
    const std::vector<std::int64_t>& starts() const { return starts_; }
    Tensors gradients() const {
        Tensors list;
        for (const at::Tensor& t : tensors_) list.push_back(t.grad());
        return list;
    }
    Tensors weights() const { return model_->parameters(); }
    std::int64_t state_bytes() const {
        std::int64_t bytes = 0;
        if (dynamic_cast<torch::optim::AdamW*>(optimizer_.get()))
            for (const auto& [_, state] : optimizer_->state()) {
                auto& means = static_cast<torch::optim::AdamWParamState&>(*state);
                bytes += std::int64_t(means.exp_avg().nbytes() + means.exp_avg_sq().nbytes());
            }
        return bytes;
    }
    std::vector<Message> take_messages() {
        return dp_ ? dp_->take_messages() : zero_ ? zero_->take_messages() : std::vector<Message>();
    }

  private:
    std::shared_ptr<Model> model_;
    std::vector<std::string> names_;
    Tensors tensors_;
    std::vector<std::int64_t> starts_;
    std::optional<DataParallel> dp_;
    std::optional<Zero1> zero_;
    std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace fived
