#include "dp_libtorch.hpp"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "fived/record.hpp"

namespace fived {

DataParallel::DataParallel(const std::vector<at::Tensor>& tensors, const Group& group,
                           std::size_t bucket_bytes)
    : group_(group && group->getSize() > 1 ? group : Group()), bucket_bytes_(bucket_bytes) {
    if (bucket_bytes == 0) throw std::invalid_argument("bucket_bytes is 0; it must be at least 1");
    std::vector<at::Tensor> unique;
    for (const at::Tensor& t : tensors) {
        if (!t.is_leaf())
            throw std::invalid_argument("tensor " + std::to_string(&t - tensors.data()) +
                                        " is the result of a computation; gradients gather in leaves only");
        if (std::ranges::none_of(unique, [&](const at::Tensor& u) { return u.is_same(t); }))
            unique.push_back(t);
    }
    const at::NoGradGuard no_grad;
    for (const at::Tensor& t : unique) {
        if (t.requires_grad()) parameters_.emplace_back().tensor = t;
        at::Tensor values = t.detach().contiguous();
        Pending pending = start("broadcast", 1, values);
        wait(pending);
        if (!values.is_alias_of(t)) t.copy_(values);
    }
    if (parameters_.empty())
        throw std::invalid_argument("none of " + std::to_string(tensors.size()) +
                                    " tensors requires a gradient; nothing can be summed");
    // Backward runs through the layers from the last to the first.
    std::vector<std::int64_t> order(parameters_.size());
    std::iota(order.rbegin(), order.rend(), 0);
    make_buckets(order);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
        Parameter& p = parameters_[i];
        p.node = torch::autograd::impl::grad_accumulator(p.tensor);
        p.hook = p.node->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
            [this, i](const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>&) {
                ready(i);
                return outputs;
            }));
    }
}

DataParallel::~DataParallel() {
    for (Parameter& p : parameters_) p.node->del_post_hook(p.hook);
}

/// An all-reduce (times 2) or a broadcast from rank 0 (times 1), in place.
DataParallel::Pending DataParallel::start(const char* op, std::int64_t times, at::Tensor& tensor) {
    Pending pending;
    if (!group_) return pending;
    pending.message = {op, times * (group_->getSize() - 1) * std::int64_t(tensor.nbytes()), 0};
    const Timer timer;  // some backends block already here
    std::vector<at::Tensor> list{tensor};
    pending.work = times == 2 ? group_->allreduce(list) : group_->broadcast(list);
    pending.message.seconds = timer.seconds();
    return pending;
}

void DataParallel::wait(Pending& pending) {
    if (!pending.work) return;
    const Timer timer;
    pending.work->wait();
    pending.message.seconds += timer.seconds();
    messages_.push_back(pending.message);
    pending.work.reset();
}

/// Cuts the parameters, in the order in which gradients come, into buckets of `bucket_bytes_`.
void DataParallel::make_buckets(const std::vector<std::int64_t>& order) {
    std::vector<std::vector<std::int64_t>> groups;
    std::size_t size = 0;
    for (const std::int64_t index : order) {
        const at::Tensor& p = parameters_[index].tensor;
        const at::Tensor* first = groups.empty() ? nullptr : &parameters_[groups.back()[0]].tensor;
        if (!first || size >= bucket_bytes_ || p.dtype() != first->dtype() || p.device() != first->device()) {
            groups.emplace_back();
            size = 0;
        }
        groups.back().push_back(index);
        size += p.nbytes();
    }
    buckets_.clear();
    for (const std::vector<std::int64_t>& members : groups) {
        const std::int64_t tail = &members == &groups.back() ? std::int64_t(parameters_.size()) : 0;
        std::int64_t length = tail, offset = 0;
        for (const std::int64_t index : members) length += parameters_[index].tensor.numel();
        const at::Tensor flat = at::zeros({length}, parameters_[members[0]].tensor.options());
        for (const std::int64_t index : members) {
            Parameter& p = parameters_[index];
            p.view = flat.narrow(0, offset, p.tensor.numel()).view(p.tensor.sizes());
            p.bucket = buckets_.size();
            offset += p.tensor.numel();
        }
        used_ = flat.narrow(0, offset, tail);
        buckets_.push_back({flat, members.size(), members.size(), {}});
    }
}

/// The hook: p.grad holds the gradient of this backward pass, earlier ones included.
void DataParallel::ready(std::size_t index) {
    if (!synchronising_) return;
    const std::lock_guard lock(mutex_);
    if (parameters_[index].filled)
        throw std::runtime_error(
            "backward ran twice before finish(): put all micro-batches but the last in no_sync()");
    fill(index);
    order_.push_back(std::int64_t(index));
    // Ranks may become ready in different orders; messages must match, so buckets leave in theirs. The last
    // one waits for finish(), which knows what was used.
    while (launched_ + 1 < buckets_.size() && buckets_[launched_].missing == 0) launch();
}

/// Makes p.grad a view into the bucket, so that from now on autograd accumulates there.
void DataParallel::fill(std::size_t index) {
    const at::NoGradGuard no_grad;
    Parameter& p = parameters_[index];
    at::Tensor& gradient = p.tensor.mutable_grad();
    if (!gradient.defined()) {
        p.view.zero_();  // unused here; another rank may have used it
    } else if (gradient.data_ptr() != p.view.data_ptr()) {
        p.view.copy_(gradient);
        gradient = p.view;
    }
    p.filled = true;
    --buckets_[p.bucket].missing;
}

void DataParallel::launch() {
    Bucket& bucket = buckets_[launched_++];
    bucket.pending = start("all_reduce", 2, bucket.flat);
}

void DataParallel::finish() {
    const at::NoGradGuard no_grad;
    std::vector<double> used;
    for (std::size_t i = parameters_.size(); i-- > 0;) {
        if (parameters_[i].filled) continue;
        fill(i);  // unused in this backward: earlier micro-batches may count
        order_.push_back(std::int64_t(i));
    }
    for (const Parameter& p : parameters_) used.push_back(p.tensor.grad().defined());
    used_.copy_(at::tensor(used));
    while (launched_ < buckets_.size()) launch();
    for (Bucket& bucket : buckets_) wait(bucket.pending);
    const at::Tensor ranks = used_.to(at::kCPU, at::kDouble);
    for (std::size_t i = 0; i < parameters_.size(); ++i)
        parameters_[i].tensor.mutable_grad() =
            ranks[i].item<double>() > 0 ? parameters_[i].view : at::Tensor();
    settle_order();
}

/// After the first backward, cuts the buckets anew in the order that rank 0 saw; all ranks must agree.
void DataParallel::settle_order() {
    if (!order_known_) {
        at::Tensor agreed = at::tensor(order_, parameters_[0].tensor.options().dtype(at::kLong));
        Pending pending = start("broadcast", 1, agreed);
        wait(pending);
        agreed = agreed.cpu();
        const std::int64_t* first = agreed.const_data_ptr<std::int64_t>();
        make_buckets({first, first + agreed.numel()});
        for (std::size_t i = 0; i < parameters_.size(); ++i)
            fill(i);  // into the new buckets; the old ones go
        order_known_ = true;
    }
    order_.clear();
    launched_ = 0;
    for (Bucket& bucket : buckets_) bucket.missing = bucket.members;
    for (Parameter& p : parameters_) p.filled = false;
}

}  // namespace fived
