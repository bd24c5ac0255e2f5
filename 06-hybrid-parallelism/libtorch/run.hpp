// A training run on a mesh, with checkpoints that any other mesh, hybrid_mpi and train_llama.py go on from.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fived/lesson/run.hpp"
#include "fived/lesson/sampler.hpp"
#include "fived/math/dtype.hpp"
#include "hybrid_libtorch.hpp"
#include "settings.hpp"

namespace fived {

/// A model with its optimizer and this rank's samples.
class RunModel {
  public:
    /// Collective.
    RunModel(const Settings& settings, Mesh& mesh)
        : s_(settings),
          mesh_(mesh),
          hybrid_(settings.shape(), mesh, settings.layout(), settings.type(),
                  [&](const std::string& name, at::IntArrayRef sizes) {
                      return initial_value(name, sizes, settings.shape().layers, settings.seed);
                  }),
          sampler_(settings.text.train, settings.seed, std::size_t(settings.sequence)),
          mine_(range(std::size_t(settings.batch), settings.places(),
                      mesh.at(Axis::dp) * settings.ep + mesh.at(Axis::ep))) {
        std::vector<torch::optim::OptimizerParamGroup> groups;
        for (const bool decay : {true, false}) {
            Tensors members;
            for (const Placed& p : hybrid_.parameters())
                if (decays(p.name) == decay) members.push_back(p.tensor);
            auto options = std::make_unique<torch::optim::AdamWOptions>();
            options->betas({0.9, 0.95}).eps(1e-5).weight_decay(decay ? settings.weight_decay : 0);
            groups.emplace_back(std::move(members), std::move(options));
        }
        optimizer_ = std::make_unique<torch::optim::AdamW>(groups);
    }

    double backward(int step) {
        const std::int64_t B = std::int64_t(mine_.length), S = s_.sequence;
        const at::Tensor tokens_BS = at::empty({B, S}, at::kLong), targets_BS = at::empty({B, S}, at::kLong);
        const auto view = [&](const at::Tensor& t) {
            return MatrixView<std::int64_t>(t.data_ptr<std::int64_t>(), mine_.length, std::size_t(S));
        };
        sampler_.take(std::uint64_t(step) * std::uint64_t(s_.batch) + mine_.begin, view(tokens_BS),
                      view(targets_BS));
        optimizer_->zero_grad();
        return hybrid_.step(tokens_BS, targets_BS).item<double>();
    }
    double clip(double largest) { return hybrid_.clip(largest); }
    void update(double rate) {
        for (auto& group : optimizer_->param_groups()) group.options().set_lr(rate);
        optimizer_->step();
        hybrid_.stepped();
    }
    std::vector<Piece> pieces() {
        std::map<std::string, std::vector<std::int64_t>> sizes;
        for (const auto& [name, of_whole] : s_.shape().parameters()) sizes[name] = of_whole;
        steps_.resize(hybrid_.parameters().size());
        std::vector<Piece> list;
        for (std::size_t i = 0; const Placed& p : hybrid_.parameters())
            add_pieces(list, p, sizes.at(p.name), steps_[i++]);
        return list;
    }
    void restored() {
        for (std::size_t i = 0; const Placed& p : hybrid_.parameters()) {
            const float step = steps_[i++];
            if (!(step >= 0) || !(step <= 0x1p24f))
                throw UsageError(s_.resume + " has " + p.name + " after " + std::to_string(step) +
                                 " steps of AdamW; 0 to 2^24 are possible");
            state(p).step(std::int64_t(step));
        }
        hybrid_.stepped();
    }

  private:
    /// AdamW's of a parameter; zeros where there is none yet.
    torch::optim::AdamWParamState& state(const Placed& p) {
        auto& kept = optimizer_->state()[p.tensor.unsafeGetTensorImpl()];
        if (!kept) {
            auto zeros = std::make_unique<torch::optim::AdamWParamState>();
            zeros->exp_avg(at::zeros_like(p.tensor)).exp_avg_sq(at::zeros_like(p.tensor));
            kept = std::move(zeros);
        }
        return static_cast<torch::optim::AdamWParamState&>(*kept);
    }
    void add_pieces(std::vector<Piece>& list, const Placed& p, const std::vector<std::int64_t>& sizes,
                    float& step) {
        // the placement cuts the numbers of the places as it cuts those of the parameter
        const at::Tensor places =
            p.placement.piece(at::arange(c10::multiply_integers(sizes)).view(sizes)).contiguous();
        const std::int64_t* place = places.data_ptr<std::int64_t>();
        const std::vector<Run> runs =
            runs_of(std::size_t(places.numel()), [&](std::size_t i) { return std::size_t(place[i]); });
        const bool written = first_replica(p);
        const auto add = [&](const std::string& prefix, const at::Tensor& x) {
            const std::vector<std::size_t> shape(sizes.begin(), sizes.end());
            with_type(s_.dtype, [&]<class T>() {
                list.emplace_back(prefix + p.name, shape, runs,
                                  std::span(x.data_ptr<T>(), std::size_t(x.numel())), written);
            });
        };
        torch::optim::AdamWParamState& adamw = state(p);
        add("", p.tensor);
        add("optimizer.exp_avg.", adamw.exp_avg());
        add("optimizer.exp_avg_sq.", adamw.exp_avg_sq());
        step = float(adamw.step());
        list.emplace_back("optimizer.step." + p.name, std::vector<std::size_t>{}, std::vector<Run>{{0, 0, 1}},
                          std::span(&step, 1), written);
    }
    /// Whether this rank is the first of those that hold the same numbers.
    bool first_replica(const Placed& p) const {
        const Axes cut = p.placement.cut_along();
        for (const Axis axis : every_axis)
            if (axis != Axis::pp && !cut.contains(axis) && mesh_.at(axis) > 0) return false;
        return !p.placement.tied || p.placement.tied->rank() == 0;
    }

    const Settings& s_;
    Mesh& mesh_;
    Hybrid hybrid_;
    Sampler sampler_;
    const Range mine_;
    std::unique_ptr<torch::optim::AdamW> optimizer_;
    std::vector<float> steps_;  // of each parameter, as in Python
};

}  // namespace fived
