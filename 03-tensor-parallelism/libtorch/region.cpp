#include "region.hpp"

#include <stdexcept>

#include "fived/math/partition.hpp"
#include "fived/torch/torch.hpp"

namespace fived {

namespace {

using torch::autograd::AutogradContext;

/// Slice r of x_BSD, a view.
at::Tensor slice(const at::Tensor& x_BSD, int r, int n) {
    const Range mine = shard_of(std::size_t(x_BSD.size(1)), n, r);
    return x_BSD.narrow(1, std::int64_t(mine.begin), std::int64_t(mine.length));
}

/// Sizes of a slice with the sequence first, padded to the longest of n.
std::vector<std::int64_t> padded(const at::Tensor& x, std::int64_t S, int n) {
    return {(S + n - 1) / n, x.size(0), x.size(2)};
}

at::Tensor gathered(const at::Tensor& x_BsD, std::int64_t S, Ranks& ranks) {
    const int n = ranks.size();
    const at::Tensor mine_lBD = x_BsD.new_zeros(padded(x_BsD, S, n));
    mine_lBD.narrow(0, 0, x_BsD.size(1)).copy_(x_BsD.transpose(0, 1));
    const at::Tensor all = mine_lBD.new_empty({n * mine_lBD.size(0), x_BsD.size(0), x_BsD.size(2)});
    Ranks::Pending pending = ranks.all_gather(all, mine_lBD);
    ranks.wait(pending);
    const at::Tensor whole_BSD = x_BsD.new_empty({x_BsD.size(0), S, x_BsD.size(2)});
    const Tensors runs = all.chunk(n);
    for (int r = 0; r < n; ++r) {
        const at::Tensor place = slice(whole_BSD, r, n);
        place.copy_(runs[std::size_t(r)].narrow(0, 0, place.size(1)).transpose(0, 1));
    }
    return whole_BSD;
}

at::Tensor scattered(const at::Tensor& x_BSD, Ranks& ranks) {
    const int n = ranks.size();
    const at::Tensor mine_lBD = x_BSD.new_empty(padded(x_BSD, x_BSD.size(1), n));
    const at::Tensor all = x_BSD.new_zeros({n * mine_lBD.size(0), x_BSD.size(0), x_BSD.size(2)});
    const Tensors runs = all.chunk(n);
    for (int r = 0; r < n; ++r) {
        const at::Tensor part = slice(x_BSD, r, n);
        runs[std::size_t(r)].narrow(0, 0, part.size(1)).copy_(part.transpose(0, 1));
    }
    Ranks::Pending pending = ranks.reduce_scatter(mine_lBD, all);
    ranks.wait(pending);
    const std::int64_t length = slice(x_BSD, ranks.rank(), n).size(1);
    return mine_lBD.narrow(0, 0, length).transpose(0, 1).contiguous();
}

RanksPtr ranks_of(AutogradContext* context) {
    if (at::GradMode::is_enabled())
        throw std::runtime_error(
            "the backward pass of tp_libtorch has no derivative: leave create_graph out");
    return c10::static_intrusive_pointer_cast<Ranks>(context->saved_data.at("ranks").toCapsule());
}

struct Gather : torch::autograd::Function<Gather> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t S,
                              const RanksPtr& ranks) {
        context->saved_data["ranks"] = at::IValue::make_capsule(ranks);
        return gathered(x, S, *ranks);
    }
    static Tensors backward(AutogradContext* context, const Tensors& dy) {
        return {scattered(dy[0], *ranks_of(context)), {}, {}};
    }
};

struct ReduceScatter : torch::autograd::Function<ReduceScatter> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const RanksPtr& ranks) {
        context->saved_data["ranks"] = at::IValue::make_capsule(ranks);
        context->saved_data["length"] = x.size(1);
        return scattered(x, *ranks);
    }
    static Tensors backward(AutogradContext* context, const Tensors& dy) {
        return {gathered(dy[0], context->saved_data.at("length").toInt(), *ranks_of(context)), {}};
    }
};

}  // namespace

at::Tensor gather(const at::Tensor& x_BsD, std::int64_t S, const RanksPtr& ranks) {
    return ranks->size() == 1 ? x_BsD : Gather::apply(x_BsD, S, ranks);
}

at::Tensor reduce_scatter(const at::Tensor& x_BSD, const RanksPtr& ranks) {
    return ranks->size() == 1 ? x_BSD : ReduceScatter::apply(x_BSD, ranks);
}

}  // namespace fived
