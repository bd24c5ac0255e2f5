#include "ep_libtorch.hpp"

#include <numeric>
#include <stdexcept>

#include "fived/torch/torch.hpp"

namespace fived {

using torch::autograd::AutogradContext;
using torch::autograd::Function;

namespace {

template <class T>
void keep(AutogradContext* context, const c10::intrusive_ptr<T>& what) {
    context->saved_data["kept"] = at::IValue::make_capsule(what);
}
ExchangePtr exchange_of(AutogradContext* context) {
    refuse_second_derivative();
    return c10::static_intrusive_pointer_cast<Exchange>(context->saved_data.at("kept").toCapsule());
}

std::int64_t total(const Counts& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

/// Blocks of rows, a x b of them, from order (a, b) to (b, a).
at::Tensor transposed(const at::Tensor& rows, const Counts& blocks_ab, std::size_t a) {
    const std::size_t b = blocks_ab.size() / a;
    if (a == 1 || b == 1) return rows;
    const Tensors blocks = rows.split_with_sizes(blocks_ab);
    Tensors turned;
    for (std::size_t j = 0; j < b; ++j)
        for (std::size_t i = 0; i < a; ++i) turned.push_back(blocks[i * b + j]);
    return at::cat(turned);
}

Counts turned(const Counts& blocks_ab, std::size_t a) {
    const std::size_t b = blocks_ab.size() / a;
    Counts blocks_ba;
    for (std::size_t j = 0; j < b; ++j)
        for (std::size_t i = 0; i < a; ++i) blocks_ba.push_back(blocks_ab[i * b + j]);
    return blocks_ba;
}

struct Dispatch : Function<Dispatch> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, const ExchangePtr& exchange) {
        keep(context, exchange);
        return exchange->there(rows);
    }
    static Tensors backward(AutogradContext* context, const Tensors& dy) {
        return {exchange_of(context)->back(dy[0]), {}};
    }
};

struct Collect : Function<Collect> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, const ExchangePtr& exchange) {
        keep(context, exchange);
        return exchange->back(rows);
    }
    static Tensors backward(AutogradContext* context, const Tensors& dy) {
        return {exchange_of(context)->there(dy[0]), {}};
    }
};

/// What choice k of each token has among the rows.
at::Tensor rows_of_choice(const at::Tensor& rows_RD, const at::Tensor& row_TK, std::int64_t k) {
    return rows_RD.index_select(0, row_TK.select(1, k));
}

struct Spread : Function<Spread> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& x_TD, const at::Tensor& token_R,
                              const at::Tensor& row_TK) {
        context->save_for_backward({row_TK});
        return x_TD.index_select(0, token_R);
    }
    static Tensors backward(AutogradContext* context, const Tensors& gradients) {
        refuse_second_derivative();
        const at::Tensor row_TK = context->get_saved_variables()[0], &drows_RD = gradients[0];
        at::Tensor dx_TD = rows_of_choice(drows_RD, row_TK, 0);
        for (std::int64_t k = 1; k < row_TK.size(1); ++k) dx_TD.add_(rows_of_choice(drows_RD, row_TK, k));
        return {dx_TD, {}, {}};
    }
};

/// In the weights' precision; rounded once, to the type of the rows.
struct Combine : Function<Combine> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& rows_RD,
                              const at::Tensor& weights_TK, const at::Tensor& row_TK) {
        context->save_for_backward({rows_RD, weights_TK, row_TK});
        const at::Tensor y_TD = weights_TK.new_zeros({row_TK.size(0), rows_RD.size(1)});
        for (std::int64_t k = 0; k < row_TK.size(1); ++k)
            y_TD.addcmul_(rows_of_choice(rows_RD, row_TK, k).to(y_TD.scalar_type()),
                          weights_TK.narrow(1, k, 1));
        return y_TD.to(rows_RD.scalar_type());
    }
    static Tensors backward(AutogradContext* context, const Tensors& gradients) {
        refuse_second_derivative();
        const Tensors saved = context->get_saved_variables();
        const at::Tensor &rows_RD = saved[0], &weights_TK = saved[1], &row_TK = saved[2];
        const at::Tensor dy_TD = gradients[0].to(weights_TK.scalar_type());
        const at::Tensor drows_RD = at::empty_like(rows_RD), dweights_TK = at::empty_like(weights_TK);
        for (std::int64_t k = 0; k < row_TK.size(1); ++k) {  // every row is the choice of one token
            const at::Tensor weight_T1 = weights_TK.narrow(1, k, 1);
            drows_RD.index_copy_(0, row_TK.select(1, k), (dy_TD * weight_T1).to(rows_RD.scalar_type()));
            dweights_TK.select(1, k).copy_((rows_of_choice(rows_RD, row_TK, k) * dy_TD).sum(-1));
        }
        return {drows_RD, dweights_TK, {}};
    }
};

void check_rows(const char* call, const at::Tensor& rows, std::int64_t needed) {
    if (rows.dim() != 2 || rows.size(0) != needed)
        throw std::invalid_argument(std::string(call) + ": " + std::to_string(rows.size(0)) +
                                    " rows where the counts say " + std::to_string(needed));
}

}  // namespace

void check_split(std::int64_t E, int n) {
    if (E < n)
        throw std::invalid_argument(std::to_string(n) + " ranks along ep are more than the " +
                                    std::to_string(E) + " experts; at most " + std::to_string(E) +
                                    " would do");
}

void check_choices(std::int64_t k, std::int64_t E) {
    if (k < 1 || k > E)
        throw std::invalid_argument("a token cannot choose " + std::to_string(k) + " of " +
                                    std::to_string(E) + " experts; 1 to " + std::to_string(E) + " would do");
}

bool is_expert(const std::string& name) {
    return name.starts_with("experts.") || name.find(".experts.") != name.npos;
}

at::Tensor piece_of(const at::Tensor& whole, const std::string& name, const Ranks& ranks) {
    if (!is_expert(name)) return whole;
    const std::int64_t E = whole.size(0);
    std::int64_t begin = 0;
    for (int r = 0; r < ranks.rank(); ++r) begin += experts_of(E, ranks.size(), r);
    return whole.narrow(0, begin, experts_of(E, ranks.size(), ranks.rank()));
}

Parameters split_experts(const Parameters& whole, const Ranks& ranks) {
    Parameters mine;
    for (const auto& [name, tensor] : whole) {
        if (is_expert(name)) check_split(tensor.size(0), ranks.size());
        mine[name] = piece_of(tensor.detach(), name, ranks).clone().requires_grad_();
    }
    return mine;
}

Exchange::Exchange(const at::Tensor& counts_E, RanksPtr ranks) : ranks_(std::move(ranks)) {
    const int n = ranks_->size();
    check_split(counts_E.numel(), n);
    if (!at::isIntegralType(counts_E.scalar_type(), false) || counts_E.lt(0).any().item<bool>())
        throw std::invalid_argument("counts_E holds numbers of rows: integers, none below 0");
    Counts experts_n;
    for (int r = 0; r < n; ++r) experts_n.push_back(experts_of(counts_E.numel(), n, r));
    const Counts mine_n(n, experts_n[ranks_->rank()]);
    const at::Tensor ours_E = counts_E.to(at::kLong).contiguous();
    at::Tensor table_ne = ours_E;  // row i: what rank i has for this rank's experts
    if (n > 1) {
        table_ne = ours_E.new_empty({total(mine_n)});
        Ranks::Pending pending = ranks_->all_to_all(table_ne, ours_E, mine_n, experts_n);
        ranks_->wait(pending);
    }
    table_ne = table_ne.view({n, -1}).cpu();
    for (const at::Tensor& counts : ours_E.cpu().split_with_sizes(experts_n))
        send_.push_back(counts.sum().item<std::int64_t>());
    const auto numbers = [](const at::Tensor& x) {
        return Counts(x.data_ptr<std::int64_t>(), x.data_ptr<std::int64_t>() + x.numel());
    };
    blocks_ne_ = numbers(table_ne), receive_ = numbers(table_ne.sum(1)), counts_e_ = numbers(table_ne.sum(0));
}

std::int64_t Exchange::rows() const {
    return total(send_);
}

std::int64_t Exchange::moved() const {
    const std::size_t me = std::size_t(ranks_->rank());
    return total(send_) - send_[me] + total(receive_) - receive_[me];
}

at::Tensor Exchange::travelled(const at::Tensor& rows, const Counts& to, const Counts& from) const {
    if (ranks_->size() == 1) return rows;
    const at::Tensor arrived = rows.new_empty({total(from), rows.size(1)});
    Ranks::Pending pending = ranks_->all_to_all(arrived, rows, from, to);
    ranks_->wait(pending);
    return arrived;
}

at::Tensor Exchange::there(const at::Tensor& rows_RD) const {
    return transposed(travelled(rows_RD.contiguous(), send_, receive_), blocks_ne_, send_.size());
}

at::Tensor Exchange::back(const at::Tensor& results_RD) const {
    const Counts blocks_en = turned(blocks_ne_, send_.size());
    return travelled(transposed(results_RD, blocks_en, counts_e_.size()).contiguous(), receive_, send_);
}

at::Tensor dispatch(const at::Tensor& rows_RD, const ExchangePtr& exchange) {
    check_rows("dispatch", rows_RD, exchange->rows());
    return Dispatch::apply(rows_RD, exchange);
}

at::Tensor collect(const at::Tensor& results_RD, const ExchangePtr& exchange) {
    check_rows("collect", results_RD, total(exchange->counts()));
    return Collect::apply(results_RD, exchange);
}

at::Tensor compute(const at::Tensor& rows_RD, const at::Tensor& counts_E, const Parameters& mine,
                   const std::string& prefix, const RanksPtr& ranks, std::int64_t* moved) {
    check_rows("compute", rows_RD, counts_E.sum().item<std::int64_t>());
    const ExchangePtr exchange = c10::make_intrusive<Exchange>(counts_E, ranks);
    if (moved) *moved += exchange->moved();
    return collect(experts(dispatch(rows_RD, exchange), exchange->counts(), mine, prefix), exchange);
}

at::Tensor mixture(const at::Tensor& x_BSD, const Parameters& mine, const std::string& prefix, int k,
                   Weights weights, const RanksPtr& ranks, std::vector<at::Tensor>* counts,
                   std::int64_t* moved) {
    const at::Tensor x_TD = x_BSD.flatten(0, -2), &router_ED = find(mine, prefix + "router.weight");
    const std::int64_t E = router_ED.size(0);
    check_choices(k, E);
    const at::ScalarType precise = at::promote_types(x_TD.scalar_type(), at::kFloat);
    const at::Tensor scores_TE = at::linear(x_TD.to(precise), router_ED.to(precise)).softmax(-1);
    const at::Tensor experts_TK = std::get<1>(scores_TE.topk(k, -1));
    at::Tensor weights_TK = scores_TE.gather(-1, experts_TK);
    if (weights == Weights::renormalised) weights_TK = weights_TK / weights_TK.sum(-1, true);

    const at::Tensor order_R = experts_TK.flatten().argsort(/*stable=*/true, 0, false);
    const at::Tensor row_TK = at::empty_like(order_R)
                                  .scatter_(0, order_R, at::arange(order_R.numel(), order_R.options()))
                                  .view_as(experts_TK);
    const at::Tensor counts_E = experts_TK.flatten().bincount({}, E);
    if (counts) counts->push_back(counts_E);

    const at::Tensor rows_RD = Spread::apply(x_TD, order_R.floor_divide(k), row_TK);
    const at::Tensor results_RD = compute(rows_RD, counts_E, mine, prefix + "experts.", ranks, moved);
    return Combine::apply(results_RD, weights_TK, row_TK).view_as(x_BSD);
}

void sum_gradients(const Parameters& mine, Ranks& ranks) {
    Tensors gradients, flat;
    for (const auto& [name, tensor] : mine) {
        if (is_expert(name)) continue;
        if (!tensor.grad().defined())
            throw std::invalid_argument(name + " has no gradient to sum: call after the backward pass");
        gradients.push_back(tensor.grad());
        flat.push_back(gradients.back().flatten());
    }
    if (ranks.size() == 1 || flat.empty()) return;
    const at::NoGradGuard no_grad;
    const at::Tensor all = at::cat(flat);
    Ranks::Pending pending = ranks.all_reduce(all);
    ranks.wait(pending);
    std::int64_t begin = 0;
    for (at::Tensor& gradient : gradients) {
        gradient.copy_(all.narrow(0, begin, gradient.numel()).view_as(gradient));
        begin += gradient.numel();
    }
}

}  // namespace fived
