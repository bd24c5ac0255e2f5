#include "placement.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>

namespace fived {

Axes Placement::cut_along() const {
    Axes axes;
    for (const Cut& cut : cuts) axes.insert(cut.axes.begin(), cut.axes.end());
    return axes;
}

Axes Placement::gradient_axes() const {
    Axes axes;
    std::ranges::set_difference(tokens, cut_along(), std::inserter(axes, axes.end()));
    return axes;
}

at::Tensor Placement::piece(at::Tensor whole) const {
    for (const Cut& cut : cuts)
        whole = cut.dim < 0 ? whole.flatten().narrow(0, cut.begin, cut.length)
                            : whole.narrow(cut.dim, cut.begin, cut.length);
    return whole;
}

int Placement::copies(const Mesh& mesh) const {
    int copies = tied ? tied->size() : 1;
    const Axes cut = cut_along();
    for (const Axis axis : every_axis)
        if (axis != Axis::pp && !cut.contains(axis)) copies *= mesh.size(axis);
    return copies;
}

void all_reduce(const at::Tensor& x, Ranks& ranks) {
    Ranks::Pending pending = ranks.all_reduce(x);
    ranks.wait(pending);
}

void sum_gradients(const std::vector<Placed>& parameters, Mesh& mesh) {
    constexpr std::size_t alone =
        64 << 10;  // bytes from which copying into a common message takes longer than a message
    const at::NoGradGuard no_grad;
    // Replicas share no message with pieces, whose sizes may differ from rank to rank: they stay equal to the bit.
    std::map<std::pair<Axes, Axes>, Tensors> together;
    for (const Placed& p : parameters) {
        at::Tensor& gradient = p.tensor.mutable_grad();
        if (!gradient.defined()) gradient = at::zeros_like(p.tensor);
        together[{p.placement.gradient_axes(), p.placement.cut_along()}].push_back(gradient);
    }
    for (const auto& [axes, gradients] : together) {
        const RanksPtr& ranks = mesh.along(axes.first);
        if (ranks->size() == 1) continue;
        std::vector<Ranks::Pending> leaving;
        Tensors small, flat;
        for (const at::Tensor& gradient : gradients)
            if (gradient.nbytes() >= alone && gradient.is_contiguous())
                leaving.push_back(ranks->all_reduce(gradient));
            else
                small.push_back(gradient), flat.push_back(gradient.flatten());
        const at::Tensor all = flat.empty() ? at::Tensor() : at::cat(flat);
        if (all.defined()) leaving.push_back(ranks->all_reduce(all));
        for (Ranks::Pending& pending : leaving) ranks->wait(pending);
        std::int64_t begin = 0;
        for (at::Tensor gradient : small) {
            gradient.copy_(all.narrow(0, begin, gradient.numel()).view_as(gradient));
            begin += gradient.numel();
        }
    }
}

void sum_tied_gradients(const std::vector<Placed>& parameters) {
    const at::NoGradGuard no_grad;
    for (const Placed& p : parameters)
        if (p.placement.tied) all_reduce(p.tensor.mutable_grad(), *p.placement.tied);
}

double squares(const std::vector<Placed>& parameters, const Mesh& mesh) {
    double sum = 0;
    for (const Placed& p : parameters)
        sum += p.tensor.grad().to(at::kDouble).square().sum().item<double>() / p.placement.copies(mesh);
    return sum;
}

double clip_gradients(const std::vector<Placed>& parameters, Mesh& mesh, double largest) {
    const at::Tensor sum = at::full({1}, squares(parameters, mesh), at::kDouble);
    all_reduce(sum, *mesh.along(every_axis));
    const double norm = std::sqrt(sum.item<double>()), factor = std::min(1.0, largest / (norm + 1e-6));
    for (const Placed& p : parameters) p.tensor.mutable_grad().mul_(factor);
    return norm;
}

}  // namespace fived
