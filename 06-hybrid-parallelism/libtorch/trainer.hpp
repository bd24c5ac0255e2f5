// A model in training: on a mesh, or on one device.
#pragma once

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bytes.hpp"
#include "hybrid_libtorch.hpp"
#include "settings.hpp"

namespace fived {

class Trainer {
  public:
    /// Collective.
    Trainer(const Settings& settings, OptimizerKind optimizer, Mesh& mesh)
        : settings_(settings), mesh_(mesh), alone_(mesh.ranks() == 1) {
        const Shape shape = settings.shape();
        Layout layout = settings.layout();
        if (alone_) layout = {read_schedule("F 0 0;B 0 0")};  // one micro-batch
        const auto value = [&](const std::string& name, at::IntArrayRef sizes) {
            return initial_value(name, sizes, shape.layers, settings.seed);
        };
        hybrid_ = std::make_unique<Hybrid>(shape, mesh, layout, settings.type(), value);
        Tensors leaves;
        for (const Placed& p : hybrid_->parameters())
            leaves.push_back(p.tensor), parameters_[p.name] = p.tensor;
        optimizer_ = make_optimizer(optimizer, leaves);
    }

    /// Leaves the gradients of the step's batch; returns its loss. Collective.
    double backward(int step) {
        optimizer_->zero_grad();
        const std::size_t n = std::size_t(mesh_.size(Axis::dp) * mesh_.size(Axis::ep));
        const std::size_t place = std::size_t(mesh_.at(Axis::dp) * mesh_.size(Axis::ep) + mesh_.at(Axis::ep));
        const auto [tokens_BS, targets_BS] =
            lm_batch(settings_.text, settings_.seed, step, cut(std::size_t(settings_.batch), n, place),
                     cut(std::size_t(settings_.batch), n, place + 1), settings_.sequence);
        return hybrid_->step(tokens_BS, targets_BS).item<double>();
    }
    /// Of this rank's gradients, each of which counts once in the sum over ranks.
    double squares() const { return fived::squares(hybrid_->parameters(), mesh_); }
    /// Collective.
    void update() {
        if (settings_.clip > 0) hybrid_->clip(settings_.clip);
        optimizer_->step();
        hybrid_->stepped();
    }
    const Parameters& parameters() const { return parameters_; }
    /// What this rank has of a tensor of the plain model.
    at::Tensor piece(const std::string& name, const at::Tensor& whole) const {
        for (const Placed& p : hybrid_->parameters())
            if (p.name == name) return p.placement.piece(whole);
        return {};
    }
    const Hybrid& hybrid() const { return *hybrid_; }
    /// Their bytes count times the ranks of the world. Keeps them by axes, too.
    std::vector<Message> take_messages() {
        std::vector<Message> all;
        sent_.clear();
        for (Mesh::Sent& sent : hybrid_->take_messages()) {
            sent.message.n_bytes = sent.message.n_bytes * mesh_.ranks() / sent.ranks;
            sent_[sent.axes] += sent.message.n_bytes;
            all.push_back(std::move(sent.message));
        }
        return all;
    }
    /// Of the messages last taken.
    const Bytes& sent() const { return sent_; }

  private:
    const Settings& settings_;
    Mesh& mesh_;
    bool alone_;
    std::unique_ptr<Hybrid> hybrid_;
    Parameters parameters_;
    std::unique_ptr<torch::optim::Optimizer> optimizer_;
    Bytes sent_;
};

}  // namespace fived
