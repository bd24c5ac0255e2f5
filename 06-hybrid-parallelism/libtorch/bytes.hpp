// Bytes that this rank sends in a step, by formula, for each of its groups: hybrid_bytes.py in C++. All numbers are times the
// ranks of the world, which makes them whole.
//
//     tp          regions: 8 (n-1)/n |x| a layer, embedding and head 2 each; 3 numbers a token for the loss
//     sp          3 (n-1) times keys and values of a layer
//     ep          rows to experts and back, forward and backward: 2 (s + r) D; 8 bytes for each expert elsewhere
//     pp          |x| for every border between two ranks; the loss; a tied head's gradient
//     dp, with all axes that a parameter's gradient is summed over: 2 (n-1)/n of the gradients; with ZeRO of units, padded
//     world       the square of the gradient norm if gradients are clipped, 8 bytes
//
// |x| is the size of all micro-batches on this rank between layers: its samples, its tokens, D numbers each.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "hybrid_libtorch.hpp"
#include "settings.hpp"

namespace fived {

using Bytes = std::map<std::string, std::int64_t>;  // by the axes of the group

class StepBytes {
  public:
    /// rows: that went to experts of others and came for this rank's, in the last step.
    StepBytes(const Hybrid& hybrid, Mesh& mesh, const Settings& settings, std::int64_t rows)
        : hybrid_(hybrid), mesh_(mesh), s_(settings), c_(settings.shape()), rows_(rows) {
        const int places = s_.places(), place = mesh.at(Axis::dp) * s_.ep + mesh.at(Axis::ep);
        samples_ = std::int64_t(range(std::size_t(s_.batch), places, place).length);
        for (const Placed& p : hybrid.parameters())
            if (p.name.starts_with("layers.")) layers_.insert(std::stoi(p.name.substr(7)));
        last_ = layers_.contains(c_.layers - 1);
        ends_ = std::int64_t(layers_.contains(0)) + last_;
    }
    Bytes all() {
        tensor(), attention(), experts(), stages(), gradients();
        add({Axis::dp, Axis::ep, Axis::sp}, summed(token_axes, 8 + size()));
        if (s_.clip > 0) add(every_axis, summed(every_axis, 8));
        std::erase_if(bytes_, [](const auto& item) { return item.second == 0; });
        return bytes_;
    }

  private:
    std::int64_t size() const { return s_.dtype == Dtype::float64 ? 8 : 4; }
    std::int64_t tokens() const { return s_.sequence / s_.sp; }
    std::int64_t kept() const { return std::int64_t(layers_.size()); }
    void add(const Axes& axes, std::int64_t bytes) { bytes_[words(axes)] += bytes; }
    /// Bytes that each rank of n sends, times all ranks, for `times` (n-1)/n of `sent` bytes.
    std::int64_t share(int n, std::int64_t times, std::int64_t sent) const {
        return times * (n - 1) * sent * mesh_.ranks() / n;
    }
    std::int64_t summed(const Axes& axes, std::int64_t sent) {
        return share(mesh_.along(axes)->size(), 2, sent);
    }

    void tensor() {
        const std::int64_t n = s_.tp, longest = (tokens() + n - 1) / n * n;
        const std::int64_t length = s_.sequence_parallel ? longest : tokens();  // slices are gathered padded
        add({Axis::tp}, share(s_.tp, 8 * kept() + 2 * ends_, samples_ * length * c_.width * size()));
        if (last_) add({Axis::tp}, share(s_.tp, 2, 3 * samples_ * tokens() * size()));
        if (c_.kv_heads % n)  // keys and values of all heads, used on several ranks
            for (const auto& [name, sizes] : c_.parameters())
                if ((name.find("k_proj") != name.npos || name.find("v_proj") != name.npos) &&
                    layers_.contains(std::stoi(name.substr(7))))
                    add({Axis::tp},
                        share(s_.tp, 2, s_.micro_batches * c10::multiply_integers(sizes) * size()));
    }
    void attention() {
        const at::Tensor rows = shared_rows(c_, *mesh_.along({Axis::tp}));
        const std::int64_t K = c_.width / c_.heads;
        const std::int64_t width = rows.defined() ? rows.numel() : c_.kv_heads * K / s_.tp;
        add({Axis::sp}, ring_bytes(kept() * samples_ * tokens() * 2 * width * size(), s_.sp) * mesh_.ranks());
    }
    void experts() {
        if (!c_.experts || s_.ep == 1) return;
        const std::int64_t others = c_.experts - experts_of(c_.experts, s_.ep, mesh_.at(Axis::ep));
        const std::int64_t counts = 8 * others * s_.micro_batches * kept();
        add({Axis::ep}, (counts + 2 * rows_ * c_.width * size()) * mesh_.ranks());
    }
    void stages() {
        if (s_.pp == 1) return;
        std::int64_t sides = -ends_;
        for (const int layer : layers_) sides += 2 * !layers_.contains(layer - 1);
        const Range part = s_.sequence_parallel ? shard_of(std::size_t(tokens()), s_.tp, mesh_.at(Axis::tp))
                                                : Range{0, std::size_t(tokens())};
        const std::int64_t x = samples_ * std::int64_t(part.length) * c_.width * size();
        add({Axis::pp}, summed({Axis::pp}, size()) + sides * x * mesh_.ranks());
        for (const Placed& p : hybrid_.parameters())
            if (p.placement.tied)
                add({Axis::pp}, share(p.placement.tied->size(), 2, p.tensor.numel() * size()));
    }
    void gradients() {
        for (const Placed& p : hybrid_.parameters()) {
            const Axes axes = p.placement.gradient_axes();
            add(axes, summed(axes, p.tensor.numel() * size()));
        }
        for (const Hybrid::Unit& unit :
             hybrid_.units())  // a reduce-scatter, an all-gather; a flag for each parameter
            add(unit.axes, summed(unit.axes, (unit.length + unit.members) * size()));
    }

    const Hybrid& hybrid_;
    Mesh& mesh_;
    const Settings& s_;
    const Shape c_;
    std::int64_t rows_, samples_ = 0, ends_ = 0;
    bool last_ = false;
    std::set<int> layers_;
    Bytes bytes_;
};

}  // namespace fived
