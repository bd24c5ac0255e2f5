#include "zero1.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace fived {

Zero1::Zero1(const Tensors& tensors, const Group& group, std::size_t bucket_bytes) : ranks_(group) {
    const Tensors trained = start_equal(tensors, ranks_);
    for (const at::Tensor& t : trained) parameters_.emplace_back().tensor = t;
    for (const auto& members : cut_into_buckets(trained, last_to_first(trained.size()), bucket_bytes))
        make_unit(members);
    hooks_.emplace(trained, [this](std::size_t i) { ready(i); });
}

/// Moves the members' weights into one buffer, of which they become views, and makes room for their gradients.
void Zero1::make_unit(const std::vector<std::int64_t>& members) {
    const at::NoGradGuard no_grad;
    std::int64_t length = 0;
    for (const std::int64_t index : members) {
        parameters_[index].start = length;
        length += parameters_[index].tensor.numel();
    }
    const std::int64_t n = ranks_.size(), share = (length + n - 1) / n;  // the last run is padded
    const at::Tensor weights = at::zeros({n * share}, parameters_[members[0]].tensor.options());
    const at::Tensor gradients = at::zeros_like(weights);
    for (const std::int64_t index : members) {
        Parameter& p = parameters_[index];
        const auto view = [&](const at::Tensor& whole) { return part(whole, p.start, p.tensor.sizes()); };
        view(weights).copy_(p.tensor);
        p.place = view(gradients);
        p.tensor.set_data(view(weights));
        p.unit = units_.size();
        const std::int64_t mine = ranks_.rank() * share;
        const std::int64_t begin = std::clamp(p.start, mine, mine + share);
        const std::int64_t end = std::clamp(p.start + p.tensor.numel(), mine, mine + share);
        p.piece = part(weights, begin, {end - begin});
        p.piece_gradient = part(gradients, begin, {end - begin});
    }
    units_.push_back({weights, gradients, members.size(), members.size(), {}});
}

at::Tensor Zero1::run(const at::Tensor& whole) const {
    const std::int64_t share = whole.numel() / ranks_.size();
    return whole.narrow(0, ranks_.rank() * share, share);
}

/// The hook: p.grad holds the gradient of this backward pass, earlier ones included.
void Zero1::ready(std::size_t index) {
    const std::lock_guard lock(mutex_);
    if (parameters_[index].filled)
        throw std::runtime_error(
            "backward ran twice before finish(): put all micro-batches but the last in no_sync()");
    move_gradient(parameters_[index].tensor, parameters_[index].place);
    if (!synchronising_) return;
    parameters_[index].filled = true;
    --units_[parameters_[index].unit].missing;
    // Ranks may become ready in different orders; messages must match, so units leave in theirs.
    while (launched_ < units_.size() && units_[launched_].missing == 0) launch();
}

void Zero1::launch() {
    Unit& unit = units_[launched_++];
    unit.pending = ranks_.reduce_scatter(run(unit.gradients), unit.gradients);
}

void Zero1::finish() {
    const at::NoGradGuard no_grad;
    std::vector<double> flags;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
        Parameter& p = parameters_[i];
        if (!p.filled) move_gradient(p.tensor, p.place);  // unused in this backward; earlier ones may count
        flags.push_back(p.tensor.grad().defined());
    }
    while (launched_ < units_.size()) launch();
    // A parameter that one rank used has a gradient on all; one that none used has none, which is not the same as zeros.
    at::Tensor used = at::tensor(flags, parameters_[0].tensor.options());
    Ranks::Pending pending = ranks_.all_reduce(used);
    for (Unit& unit : units_) {
        ranks_.wait(unit.pending);
        unit.missing = unit.members;
    }
    ranks_.wait(pending);
    used = used.to(at::kCPU, at::kDouble);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
        Parameter& p = parameters_[i];
        p.piece.mutable_grad() = used[i].item<double>() > 0 ? p.piece_gradient : at::Tensor();
        p.tensor.mutable_grad() = at::Tensor();  // what it held is a part of a sum
        p.filled = false;
    }
    launched_ = 0;
}

void Zero1::gather() {
    for (Unit& unit : units_) unit.pending = ranks_.all_gather(unit.weights, run(unit.weights));
    for (Unit& unit : units_) ranks_.wait(unit.pending);
}

double Zero1::gradient_norm() {
    at::Tensor squares = at::zeros({1}, parameters_[0].tensor.options().dtype(at::kDouble));
    for (const Parameter& p : parameters_)
        if (p.piece.grad().defined()) squares += p.piece.grad().to(at::kDouble).square().sum();
    Ranks::Pending pending = ranks_.all_reduce(squares);
    ranks_.wait(pending);
    return std::sqrt(squares.item<double>());
}

Tensors Zero1::pieces() const {
    Tensors list;
    for (const Parameter& p : parameters_) list.push_back(p.piece);
    return list;
}

std::vector<std::vector<std::int64_t>> Zero1::sizes() const {
    std::vector<std::vector<std::int64_t>> all;
    for (const Parameter& p : parameters_) {
        const std::int64_t share = units_[p.unit].weights.numel() / ranks_.size();
        auto& sizes = all.emplace_back();
        const auto before = [&](int r) { return std::clamp(r * share, p.start, p.start + p.tensor.numel()); };
        for (int r = 0; r < ranks_.size(); ++r) sizes.push_back(before(r + 1) - before(r));
    }
    return all;
}

}  // namespace fived
