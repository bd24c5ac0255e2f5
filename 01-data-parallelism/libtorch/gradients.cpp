#include "gradients.hpp"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace fived {

GradientHooks::GradientHooks(const Tensors& tensors, const std::function<void(std::size_t)>& ready) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        Hook& hook = hooks_.emplace_back();
        hook.node = torch::autograd::impl::grad_accumulator(tensors[i]);
        hook.key = hook.node->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
            [ready, i](const Tensors& outputs, const Tensors&) {
                ready(i);
                return outputs;
            }));
    }
}

GradientHooks::~GradientHooks() {
    for (Hook& hook : hooks_) hook.node->del_post_hook(hook.key);
}

Tensors start_equal(const Tensors& tensors, Ranks& ranks) {
    Tensors unique, trained;
    for (const at::Tensor& t : tensors) {
        if (!t.is_leaf())
            throw std::invalid_argument("tensor " + std::to_string(&t - tensors.data()) +
                                        " is the result of a computation; gradients gather in leaves only");
        if (std::ranges::none_of(unique, [&](const at::Tensor& u) { return u.is_same(t); }))
            unique.push_back(t);
    }
    const at::NoGradGuard no_grad;
    for (const at::Tensor& t : unique) {
        if (t.requires_grad()) trained.push_back(t);
        at::Tensor values = t.detach().contiguous();
        Ranks::Pending pending = ranks.broadcast(values);
        ranks.wait(pending);
        if (!values.is_alias_of(t)) t.copy_(values);
    }
    if (trained.empty())
        throw std::invalid_argument("none of " + std::to_string(tensors.size()) +
                                    " tensors requires a gradient; nothing can be summed");
    return trained;
}

std::vector<std::vector<std::int64_t>> cut_into_buckets(const Tensors& tensors,
                                                        const std::vector<std::int64_t>& order,
                                                        std::size_t bucket_bytes) {
    if (bucket_bytes == 0) throw std::invalid_argument("bucket_bytes is 0; it must be at least 1");
    std::vector<std::vector<std::int64_t>> buckets;
    std::size_t size = 0;
    for (const std::int64_t index : order) {
        const at::Tensor& t = tensors[index];
        const at::Tensor* first = buckets.empty() ? nullptr : &tensors[buckets.back()[0]];
        if (!first || size >= bucket_bytes || t.dtype() != first->dtype() || t.device() != first->device()) {
            buckets.emplace_back();
            size = 0;
        }
        buckets.back().push_back(index);
        size += t.nbytes();
    }
    return buckets;
}

void move_gradient(const at::Tensor& tensor, const at::Tensor& place) {
    const at::NoGradGuard no_grad;
    at::Tensor& gradient = tensor.mutable_grad();
    if (!gradient.defined()) {
        place.zero_();  // unused here; another rank may have used it
    } else if (gradient.data_ptr() != place.data_ptr()) {
        place.copy_(gradient);
        gradient = place;
    }
}

at::Tensor part(const at::Tensor& flat, std::int64_t start, at::IntArrayRef sizes) {
    return flat.narrow(0, start, c10::multiply_integers(sizes)).view(sizes).detach();
}

std::vector<std::int64_t> last_to_first(std::size_t count) {
    std::vector<std::int64_t> order(count);
    std::iota(order.rbegin(), order.rend(), 0);
    return order;
}

}  // namespace fived
