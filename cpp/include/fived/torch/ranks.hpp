// The ranks of a torch process group, as what is written against c10d sees them: every message is counted.
#pragma once

#include <torch/types.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fived/lesson/record.hpp"

namespace fived {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;

/// One message of a group of n ranks: this rank sent n_bytes / n bytes and was blocked for `seconds`. Collectives count
/// as the ring's.
struct Message {
    std::string op;
    std::int64_t n_bytes;
    double seconds;
};

/// Starts messages and waits for them. |x|: bytes of the whole tensor. Tensors are contiguous and stay as they are
/// until wait().
/// An object of torch's kind, so that autograd's nodes can hold it.
class Ranks final : public torch::CustomClassHolder {
  public:
    /// `group` is null for one rank, which sends nothing.
    explicit Ranks(const Group& group) : group_(group && group->getSize() > 1 ? group : Group()) {}
    int rank() const { return group_ ? group_->getRank() : 0; }
    int size() const { return group_ ? group_->getSize() : 1; }

    using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
    struct Pending {
        Works works;
        Message message;
        std::function<void()> finish{};  // when all has arrived
    };
    /// In place: P to R. Sends 2 (n-1)/n |x|.
    [[nodiscard]] Pending all_reduce(const at::Tensor& x,
                                     c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM) const {
        return start("all_reduce", 2 * (size() - 1), x, [&]() -> Works {
            Tensors list{x};
            c10d::AllreduceOptions options;
            options.reduceOp = op;
            return {group_->allreduce(list, options)};
        });
    }
    /// In place: rank 0's to R. (n-1)/n |x|.
    [[nodiscard]] Pending broadcast(const at::Tensor& x) const {
        return start("broadcast", size() - 1, x, [&]() -> Works {
            Tensors list{x};
            return {group_->broadcast(list)};
        });
    }
    /// P to S: `mine`, this rank's run of x, becomes the sum of all ranks' runs there. (n-1)/n |x|. gloo's own sends
    /// twice that: there an all-to-all carries the terms, and wait() adds them in the order of the ranks.
    [[nodiscard]] Pending reduce_scatter(at::Tensor mine, at::Tensor x) const {
        const bool adds_itself = group_ && group_->getBackend(x.device().type())->getBackendName() == "gloo";
        const at::Tensor terms = adds_itself ? at::empty_like(x) : at::Tensor();
        Pending pending = start("reduce_scatter", size() - 1, x, [&]() -> Works {
            at::Tensor into = terms;
            std::vector<std::int64_t> equal;
            if (adds_itself) return {group_->all_to_all_single(into, x, equal, equal)};
            return {group_->reduce_scatter_single(mine, x)};
        });
        if (adds_itself) pending.finish = [mine, terms, n = size()] { add_up(mine, terms, n); };
        return pending;
    }
    /// S to R: x becomes every rank's `mine`, which is this rank's run of it. (n-1)/n |x|.
    [[nodiscard]] Pending all_gather(at::Tensor x, at::Tensor mine) const {
        return start("all_gather", size() - 1, x,
                     [&]() -> Works { return {group_->all_gather_single(x, mine)}; });
    }
    /// Rows of x go to the ranks, send[r] of them to rank r, and into `into` come receive[r] of rank r. Sends what is for others.
    [[nodiscard]] Pending all_to_all(at::Tensor into, at::Tensor x, std::vector<std::int64_t> receive,
                                     std::vector<std::int64_t> send) const {
        Pending pending = start("all_to_all", size(), x, [&]() -> Works {
            return {group_->all_to_all_single(into, x, receive, send)};
        });
        pending.message.n_bytes -= size() * send[rank()] * x.stride(0) * std::int64_t(x.element_size());
        return pending;
    }
    /// x to rank `to`: sends |x|. What goes to one rank arrives there in the order in which it was sent.
    [[nodiscard]] Pending send(const at::Tensor& x, int to) const {
        return start("send", size(), x, [&]() -> Works {
            Tensors list{x};
            return {group_->send(list, to, 0)};
        });
    }
    /// x becomes what rank `from` sends next.
    [[nodiscard]] Pending receive(const at::Tensor& x, int from) const {
        return start("receive", 0, x, [&]() -> Works {
            Tensors list{x};
            return {group_->recv(list, from, 0)};
        });
    }
    /// x to rank `to` while `into` comes from rank `from`: both at once, so that no order can deadlock. Sends |x|.
    [[nodiscard]] Pending exchange(const at::Tensor& x, int to, const at::Tensor& into, int from,
                                   int tag) const {
        return start("exchange", size(), x, [&]() -> Works {
            const c10::DeviceType device = x.device().type();
            const bool together = group_->getBackend(device)->supportsCoalescing();  // NCCL must know both
            if (together) group_->startCoalescing(device);
            Tensors sent{x}, received{into};
            Works works{group_->send(sent, to, tag), group_->recv(received, from, tag)};
            if (together) return {group_->endCoalescing(device)};
            return works;
        });
    }
    void wait(Pending& pending) {
        if (pending.works.empty()) return;
        const Timer timer;
        for (const auto& work : pending.works) work->wait();
        pending.works.clear();
        if (const auto finish = std::exchange(pending.finish, {})) finish();
        pending.message.seconds += timer.seconds();
        const std::lock_guard lock(mutex_);
        sent_.push_back(pending.message);
    }
    /// What was sent since the last call.
    std::vector<Message> take_messages() {
        const std::lock_guard lock(mutex_);
        return std::exchange(sent_, {});
    }

  private:
    /// out = the sum of the n runs of `terms`, in their order; half types are added in float32 and rounded once.
    static void add_up(const at::Tensor& out, const at::Tensor& terms, int n) {
        const at::NoGradGuard no_grad;
        const at::Tensor runs = terms.view({n, -1});
        const bool half = terms.scalar_type() == at::kHalf || terms.scalar_type() == at::kBFloat16;
        at::Tensor sum = half ? runs[0].to(at::kFloat) : runs[0];
        for (int r = 1; r < n; ++r) sum += runs[r];
        out.copy_(sum.view_as(out));
    }
    template <class Start>
    Pending start(const char* op, std::int64_t times, const at::Tensor& x, Start call) const {
        if (!group_) return {};
        const Timer timer;  // some backends block already here
        Works works = call();
        return {std::move(works), {op, times * std::int64_t(x.nbytes()), timer.seconds()}};
    }

    Group group_;
    std::mutex mutex_;  // autograd has a thread for each device
    std::vector<Message> sent_;
};

using RanksPtr = c10::intrusive_ptr<Ranks>;

}  // namespace fived
