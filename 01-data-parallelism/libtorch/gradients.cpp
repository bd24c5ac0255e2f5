#include "gradients.hpp"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "fived/record.hpp"

namespace fived {

template <class Start>
Messages::Pending Messages::start(const char* op, std::int64_t times, const at::Tensor& whole, Start call) {
    Pending pending;
    if (!group_) return pending;
    pending.message = {op, times * (size() - 1) * std::int64_t(whole.nbytes()), 0};
    const Timer timer;  // some backends block already here
    pending.work = call();
    pending.message.seconds = timer.seconds();
    return pending;
}

Messages::Pending Messages::all_reduce(at::Tensor x) {
    return start("all_reduce", 2, x, [&] {
        Tensors list{x};
        return group_->allreduce(list);
    });
}

Messages::Pending Messages::broadcast(at::Tensor x) {
    return start("broadcast", 1, x, [&] {
        Tensors list{x};
        return group_->broadcast(list);
    });
}

Messages::Pending Messages::reduce_scatter(at::Tensor mine, at::Tensor x) {
    return start("reduce_scatter", 1, x, [&] { return group_->reduce_scatter_single(mine, x); });
}

Messages::Pending Messages::all_gather(at::Tensor x, at::Tensor mine) {
    return start("all_gather", 1, x, [&] { return group_->all_gather_single(x, mine); });
}

void Messages::wait(Pending& pending) {
    if (!pending.work) return;
    const Timer timer;
    pending.work->wait();
    pending.message.seconds += timer.seconds();
    sent_.push_back(pending.message);
    pending.work.reset();
}

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

Tensors start_equal(const Tensors& tensors, Messages& messages) {
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
        Messages::Pending pending = messages.broadcast(values);
        messages.wait(pending);
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

at::Tensor part(const at::Tensor& flat, std::int64_t start, at::IntArrayRef sizes) {
    return flat.narrow(0, start, c10::multiply_integers(sizes)).view(sizes).detach();
}

std::vector<std::int64_t> last_to_first(std::size_t count) {
    std::vector<std::int64_t> order(count);
    std::iota(order.rbegin(), order.rend(), 0);
    return order;
}

}  // namespace fived
