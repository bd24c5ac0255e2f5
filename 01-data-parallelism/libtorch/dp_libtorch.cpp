#include "dp_libtorch.hpp"

#include <algorithm>
#include <stdexcept>

namespace fived {

DataParallel::DataParallel(const Tensors& tensors, const Group& group, std::size_t bucket_bytes)
    : ranks_(group), bucket_bytes_(bucket_bytes) {
    const Tensors trained = start_equal(tensors, ranks_);
    for (const at::Tensor& t : trained) parameters_.emplace_back().tensor = t;
    make_buckets(last_to_first(trained.size()));
    hooks_.emplace(trained, [this](std::size_t i) { ready(i); });
}

/// Cuts the parameters, in the order in which gradients come, into buckets of `bucket_bytes_`.
void DataParallel::make_buckets(const std::vector<std::int64_t>& order) {
    Tensors tensors;
    for (const Parameter& p : parameters_) tensors.push_back(p.tensor);
    const auto groups = cut_into_buckets(tensors, order, bucket_bytes_);
    buckets_.clear();
    for (const std::vector<std::int64_t>& members : groups) {
        const std::int64_t tail = &members == &groups.back() ? std::int64_t(parameters_.size()) : 0;
        std::int64_t length = tail, offset = 0;
        for (const std::int64_t index : members) length += parameters_[index].tensor.numel();
        const at::Tensor flat = at::zeros({length}, parameters_[members[0]].tensor.options());
        for (const std::int64_t index : members) {
            Parameter& p = parameters_[index];
            p.view = part(flat, offset, p.tensor.sizes());
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

void DataParallel::fill(std::size_t index) {
    Parameter& p = parameters_[index];
    move_gradient(p.tensor, p.view);
    p.filled = true;
    --buckets_[p.bucket].missing;
}

void DataParallel::launch() {
    Bucket& bucket = buckets_[launched_++];
    bucket.pending = ranks_.all_reduce(bucket.flat);
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
    for (Bucket& bucket : buckets_) ranks_.wait(bucket.pending);
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
        Ranks::Pending pending = ranks_.broadcast(agreed);
        ranks_.wait(pending);
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
