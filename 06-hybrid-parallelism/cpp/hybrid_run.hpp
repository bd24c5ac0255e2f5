// A training run on a mesh, with checkpoints that any other mesh, hybrid_libtorch and train_llama.py go on from.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fived/lesson/run.hpp"
#include "fived/lesson/sampler.hpp"
#include "fived/math/optimizer.hpp"
#include "hybrid_mpi.hpp"
#include "hybrid_settings.hpp"

namespace fived {

/// A model with its optimizer and this rank's samples.
template <class T>
class RunModel {
  public:
    /// Collective.
    RunModel(const Settings& settings, const Mesh& mesh)
        : s_(settings),
          mesh_(mesh),
          model_(settings.shape(), mesh, settings.schedules.front().second, settings.sequence,
                 settings.order(), settings.seed),
          sampler_(settings.text.train, settings.seed, settings.sequence),
          mine_(range(std::size_t(settings.batch), mesh.along(sample_axes).size(),
                      mesh.along(sample_axes).rank())),
          tokens_(mine_.length * settings.sequence),
          targets_(tokens_.size()) {
        // the decay is update()'s, which knows the names
        adamw_.beta2 = 0.95, adamw_.decay = 0;
    }

    double backward(int step) {
        const std::size_t S = s_.sequence;
        const MatrixView<std::int64_t> tokens_BS(tokens_.data(), mine_.length, S),
            targets_BS(targets_.data(), mine_.length, S);
        sampler_.take(std::uint64_t(step) * s_.batch + mine_.begin, tokens_BS, targets_BS);
        return model_.loss_and_gradients(tokens_BS, targets_BS);
    }
    double clip(double largest) {
        const double norm = model_.gradient_norm();
        const T factor = T(std::min(1.0, largest / (norm + 1e-6)));
        for (T& g : model_.gradients()) g *= factor;
        return norm;
    }
    void update(double rate) {
        const T keep = T(1 - rate * s_.weight_decay);
        for (const Placed& p : model_.parameters())
            if (decays(p.name))
                for (T& w : model_.weights().subspan(p.offset, p.size())) w *= keep;
        adamw_.rate = rate;
        model_.step(adamw_);
    }
    std::vector<Piece> pieces() {
        adamw_.resize(model_.weights().size());
        steps_.assign(model_.parameters().size(), float(adamw_.steps()));
        std::vector<Piece> list;
        for (std::size_t i = 0; i < steps_.size(); ++i) {
            const Placed& p = model_.parameters()[i];
            const std::vector<Run> runs = runs_of(p.size(), [&](std::size_t k) { return p.place(k); });
            const bool written = first_replica(p);
            const auto add = [&](const std::string& prefix, std::span<T> all) {
                list.emplace_back(prefix + p.name, p.whole_shape, runs, all.subspan(p.offset, p.size()),
                                  written);
            };
            add("", model_.weights());
            add("optimizer.exp_avg.", adamw_.mean());
            add("optimizer.exp_avg_sq.", adamw_.square());
            list.emplace_back("optimizer.step." + p.name, std::vector<std::size_t>{},
                              std::vector<Run>{{0, 0, 1}}, std::span(&steps_[i], 1), written);
        }
        return list;
    }
    /// Throws UsageError for parameters that have taken different numbers of steps: here one number is kept.
    void restored() {
        const auto [least, most] = std::ranges::minmax(steps_);
        if (!(least >= 0) || !(most <= 0x1p24f) || least < most)
            throw UsageError(s_.resume + " has parameters after " + std::to_string(least) + " and after " +
                             std::to_string(most) + " steps of AdamW; one number is needed");
        adamw_.set_steps(int(least));
    }

  private:
    /// Whether this rank is the first of those that hold the same numbers.
    bool first_replica(const Placed& p) const {
        for (const Axis axis : values_of<Axis>())
            if (!p.split.contains(axis) && mesh_.at(axis) > 0) return false;
        return !p.tied || model_.schedule().owner.front() == mesh_.at(Axis::pp);
    }

    const Settings& s_;
    const Mesh& mesh_;
    Hybrid<T> model_;
    AdamW<T> adamw_;
    Sampler sampler_;
    const Range mine_;
    std::vector<std::int64_t> tokens_, targets_;
    std::vector<float> steps_;  // of each parameter, as torch keeps them
};

}  // namespace fived
