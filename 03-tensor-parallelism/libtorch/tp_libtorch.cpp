#include "tp_libtorch.hpp"

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "fived/math/partition.hpp"
#include "fived/torch/torch.hpp"

namespace fived {

using torch::autograd::AutogradContext;
using torch::autograd::Function;

namespace {

void keep(AutogradContext* context, const RanksPtr& ranks) {
    context->saved_data["ranks"] = at::IValue::make_capsule(ranks);
}

RanksPtr ranks_of(AutogradContext* context) {
    if (at::GradMode::is_enabled())
        throw std::runtime_error(
            "the backward pass of tp_libtorch has no derivative: leave create_graph out");
    return c10::static_intrusive_pointer_cast<Ranks>(context->saved_data.at("ranks").toCapsule());
}

void sum(const at::Tensor& x, Ranks& ranks, c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM) {
    Ranks::Pending pending = ranks.all_reduce(x, op);
    ranks.wait(pending);
}

at::Tensor summed(const at::Tensor& x, Ranks& ranks) {
    const at::Tensor total = x.clone(at::MemoryFormat::Contiguous);
    sum(total, ranks);
    return total;
}

struct Copy : Function<Copy> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const RanksPtr& ranks) {
        keep(context, ranks);
        return x.view_as(x);
    }
    static Tensors backward(AutogradContext* context, const Tensors& dy) {
        return {summed(dy[0], *ranks_of(context)), {}};
    }
};

struct Reduce : Function<Reduce> {
    static at::Tensor forward(AutogradContext*, const at::Tensor& x, const RanksPtr& ranks) {
        return summed(x, *ranks);
    }
    static Tensors backward(AutogradContext*, const Tensors& dy) { return {dy[0], {}}; }
};

struct Columns : Function<Columns> {
    static Tensors forward(AutogradContext* context, const at::Tensor& x_BSD, at::TensorList weights,
                           at::TensorList biases, const RanksPtr& ranks, const DeferredPtr& deferred) {
        Tensors saved{x_BSD}, results;
        for (std::size_t i = 0; i < weights.size(); ++i) {
            saved.push_back(weights[i]);
            results.push_back(at::linear(
                x_BSD, weights[i], biases.empty() ? std::nullopt : std::optional<at::Tensor>(biases[i])));
        }
        context->save_for_backward(saved);
        context->saved_data["bias"] = !biases.empty();
        keep(context, ranks), keep(context, deferred);
        return results;
    }
    static Tensors backward(AutogradContext* context, const Tensors& dy) {
        const RanksPtr ranks = ranks_of(context);
        const Tensors saved = context->get_saved_variables();
        const at::Tensor& x_BSD = saved[0];
        at::Tensor dx_ND;
        Ranks::Pending pending;
        if (context->needs_input_grad(0)) {
            for (std::size_t i = 0; i < dy.size(); ++i) {
                const at::Tensor dy_Nf = dy[i].flatten(0, -2);
                dx_ND = dx_ND.defined() ? dx_ND.addmm_(dy_Nf, saved[i + 1]) : dy_Nf.mm(saved[i + 1]);
            }
            pending = ranks->all_reduce(dx_ND);
        }
        Tensors gradients{{}};
        const DeferredPtr deferred = deferred_of(context);
        for (std::size_t i = 0; i < dy.size(); ++i)
            gradients.push_back(context->needs_input_grad(i + 1)
                                    ? weight_gradient(saved[i + 1], dy[i], x_BSD, deferred)
                                    : at::Tensor());
        if (context->saved_data["bias"].toBool())
            for (const at::Tensor& dy_BSf : dy) gradients.push_back(dy_BSf.flatten(0, -2).sum(0));
        gradients.resize(gradients.size() + 2);  // of the ranks there is none, nor of `deferred`
        ranks->wait(pending);
        if (dx_ND.defined()) gradients[0] = dx_ND.view_as(x_BSD);
        return gradients;
    }
};

struct Rows : Function<Rows> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& x_BSf, const at::Tensor& weight_Df,
                              const RanksPtr& ranks, const DeferredPtr& deferred) {
        context->save_for_backward({x_BSf, weight_Df});
        keep(context, ranks), keep(context, deferred);
        const at::Tensor y_BSD = at::linear(x_BSf, weight_Df).contiguous();
        sum(y_BSD, *ranks);
        return y_BSD;
    }
    static Tensors backward(AutogradContext* context, const Tensors& dy) {
        ranks_of(context);
        const Tensors saved = context->get_saved_variables();
        const at::Tensor dw = context->needs_input_grad(1)
                                  ? weight_gradient(saved[1], dy[0], saved[0], deferred_of(context))
                                  : at::Tensor();
        return {dy[0].matmul(saved[1]), dw, {}, {}};
    }
};

/// (where each token stands in this rank's piece, any place for another rank's tokens; is it this rank's).
std::pair<at::Tensor, at::Tensor> inside(const at::Tensor& tokens, std::int64_t vocabulary,
                                         std::int64_t length, const Ranks& ranks) {
    const Range held = shard_of(std::size_t(vocabulary), ranks.size(), ranks.rank());
    const std::int64_t begin = std::int64_t(held.begin), end = std::int64_t(held.end());
    if (length != end - begin)
        throw std::invalid_argument("rank " + std::to_string(ranks.rank()) + " of " +
                                    std::to_string(ranks.size()) + " has " + std::to_string(length) +
                                    " entries of a vocabulary of " + std::to_string(vocabulary) + "; " +
                                    std::to_string(end - begin) + " are its piece");
    const at::Tensor mine = tokens.ge(begin).logical_and(tokens.lt(end));
    return {at::where(mine, tokens - begin, 0), mine};
}

/// Cross-entropy of each token. With m the largest logit: log(sum of exp(z - m)) - (z_target - m).
struct CrossEntropy : Function<CrossEntropy> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& logits_Nv,
                              const at::Tensor& targets_N, std::int64_t vocabulary, const RanksPtr& ranks) {
        const auto [place_N, mine_N] = inside(targets_N, vocabulary, logits_Nv.size(1), *ranks);
        const at::Tensor largest_N = logits_Nv.amax(-1);
        sum(largest_N, *ranks, c10d::ReduceOp::MAX);
        at::Tensor shifted_Nv = logits_Nv - largest_N.unsqueeze(1);
        const at::Tensor at_target_N = shifted_Nv.gather(1, place_N.unsqueeze(1)).squeeze(1) * mine_N;
        const at::Tensor sums_2N = at::stack({shifted_Nv.exp_().sum(-1), at_target_N});
        sum(sums_2N, *ranks);
        const at::Tensor softmax_Nv = shifted_Nv.div_(sums_2N[0].unsqueeze(1));
        context->save_for_backward({softmax_Nv, place_N, mine_N});
        keep(context, ranks);
        return sums_2N[0].log() - sums_2N[1];
    }
    static Tensors backward(AutogradContext* context, const Tensors& dloss) {
        ranks_of(context);
        const Tensors saved = context->get_saved_variables();
        const at::Tensor dlogits_Nv = saved[0] * dloss[0].unsqueeze(1);
        dlogits_Nv.scatter_add_(1, saved[1].unsqueeze(1), (dloss[0] * saved[2]).neg().unsqueeze(1));
        return {dlogits_Nv, {}, {}, {}};
    }
};

}  // namespace

int split_dimension(const std::string& name) {
    const auto has = [&](const char* part) { return name.find(part) != name.npos; };
    for (const char* columns :
         {"q_proj", "k_proj", "v_proj", "up_proj", "gate_proj", "embed_tokens", "lm_head"})
        if (has(columns)) return 0;
    return has("o_proj.weight") || has("down_proj.weight") ? 1 : -1;
}

at::Tensor piece_of(const at::Tensor& whole, int dim, const Ranks& ranks) {
    if (dim < 0) return whole;
    const Range mine = shard_of(std::size_t(whole.size(dim)), ranks.size(), ranks.rank());
    return whole.narrow(dim, std::int64_t(mine.begin), std::int64_t(mine.length));
}

Parameters split(const Parameters& whole, const Ranks& ranks) {
    Parameters mine;
    for (const auto& [name, tensor] : whole) {
        const int dim = split_dimension(name);
        if (dim >= 0 && tensor.size(dim) < ranks.size())
            throw std::invalid_argument(name + " has " + std::to_string(tensor.size(dim)) +
                                        " rows or columns to split over " + std::to_string(ranks.size()) +
                                        " ranks; at most " + std::to_string(tensor.size(dim)) + " would do");
        mine[name] = piece_of(tensor.detach(), dim, ranks)
                         .clone(at::MemoryFormat::Contiguous)
                         .requires_grad_(tensor.requires_grad());
    }
    return mine;
}

at::Tensor copy(const at::Tensor& x, const RanksPtr& ranks) {
    return ranks->size() == 1 ? x : Copy::apply(x, ranks);
}

at::Tensor reduce(const at::Tensor& x, const RanksPtr& ranks) {
    return ranks->size() == 1 ? x : Reduce::apply(x, ranks);
}

Tensors column_parallel(const at::Tensor& x_BSD, const Tensors& weights, const Tensors& biases,
                        const RanksPtr& ranks, const DeferredPtr& deferred) {
    if (!biases.empty() && biases.size() != weights.size())
        throw std::invalid_argument(std::to_string(biases.size()) + " biases for " +
                                    std::to_string(weights.size()) + " weights; give none or one a weight");
    if (ranks->size() > 1 || deferred)
        return Columns::apply(x_BSD, at::TensorList(weights), at::TensorList(biases), ranks, deferred);
    Tensors results;
    for (std::size_t i = 0; i < weights.size(); ++i)
        results.push_back(at::linear(x_BSD, weights[i],
                                     biases.empty() ? std::nullopt : std::optional<at::Tensor>(biases[i])));
    return results;
}

at::Tensor row_parallel(const at::Tensor& x_BSf, const at::Tensor& weight_Df, const at::Tensor& bias_D,
                        const RanksPtr& ranks, const DeferredPtr& deferred) {
    const at::Tensor y_BSD = ranks->size() == 1 && !deferred ? at::linear(x_BSf, weight_Df)
                                                             : Rows::apply(x_BSf, weight_Df, ranks, deferred);
    return bias_D.defined() ? y_BSD + bias_D : y_BSD;
}

at::Tensor partial_embedding(const at::Tensor& tokens_BS, const at::Tensor& weight_vD,
                             std::int64_t vocabulary, const Ranks& ranks) {
    const auto [place_BS, mine_BS] = inside(tokens_BS, vocabulary, weight_vD.size(0), ranks);
    if (ranks.size() == 1) return at::embedding(weight_vD, tokens_BS);
    return at::embedding(weight_vD, place_BS) * mine_BS.unsqueeze(-1);
}

at::Tensor embedding(const at::Tensor& tokens_BS, const at::Tensor& weight_vD, std::int64_t vocabulary,
                     const RanksPtr& ranks) {
    return reduce(partial_embedding(tokens_BS, weight_vD, vocabulary, *ranks), ranks);
}

std::pair<at::Tensor, at::Tensor> cross_entropy_sum(const at::Tensor& logits_BSv,
                                                    const at::Tensor& targets_BS, std::int64_t vocabulary,
                                                    const RanksPtr& ranks, std::int64_t ignore_index) {
    const at::Tensor logits_Nv =
        logits_BSv.flatten(0, -2).to(at::promote_types(logits_BSv.scalar_type(), at::kFloat));
    const at::Tensor targets_N = targets_BS.flatten(), counted_N = targets_N.ne(ignore_index);
    const at::Tensor outside_N = counted_N.logical_and(targets_N.lt(0).logical_or(targets_N.ge(vocabulary)));
    if (targets_N.is_cpu() && outside_N.any().item<bool>()) {  // a GPU would have to stop for it
        const auto target = targets_N.masked_select(outside_N)[0].item<std::int64_t>();
        throw std::invalid_argument("target " + std::to_string(target) + " is not in a vocabulary of " +
                                    std::to_string(vocabulary) + "; 0 to " + std::to_string(vocabulary - 1) +
                                    " are, and " + std::to_string(ignore_index) + " does not count");
    }
    if (ranks->size() == 1)
        return {at::cross_entropy_loss(logits_Nv, targets_N, {}, at::Reduction::Sum, ignore_index),
                counted_N.sum()};
    const at::Tensor loss_N = CrossEntropy::apply(logits_Nv, targets_N, vocabulary, ranks);
    return {at::where(counted_N, loss_N, 0).sum(), counted_N.sum()};
}

at::Tensor norm(const at::Tensor& x_BSD, const Parameters& parameters, const std::string& prefix) {
    return at::layer_norm(x_BSD, {x_BSD.size(-1)}, find(parameters, prefix + "weight"),
                          find(parameters, prefix + "bias"), 1e-5);
}

void check_heads(int heads, int n) {
    if (heads >= 1 && heads % n == 0) return;
    std::string fits;
    for (int k = 1; k <= heads; ++k)
        if (heads % k == 0) fits += (k == 1 ? "" : ", ") + std::to_string(k);
    throw std::invalid_argument(std::to_string(heads) + " heads do not divide over " + std::to_string(n) +
                                " ranks along tp" + (fits.empty() ? "" : "; " + fits + " would do"));
}

at::Tensor layer(const at::Tensor& x_BSD, const Parameters& mine, const std::string& prefix, int heads,
                 const RanksPtr& ranks) {
    check_heads(heads, ranks->size());
    const auto weight = [&](const char* name) { return find(mine, prefix + name + ".weight"); };
    const auto bias = [&](const char* name) { return find(mine, prefix + name + ".bias"); };

    const Tensors qkv_BSf = column_parallel(
        norm(x_BSD, mine, prefix + "attention_norm."),
        {weight("attention.q_proj"), weight("attention.k_proj"), weight("attention.v_proj")},
        {bias("attention.q_proj"), bias("attention.k_proj"), bias("attention.v_proj")}, ranks);
    const auto to_heads = [&](const at::Tensor& x_BSf) {
        return x_BSf.unflatten(-1, {heads / ranks->size(), -1}).transpose(1, 2);  // BhSK
    };
    const at::Tensor y_BhSK = at::scaled_dot_product_attention(
        to_heads(qkv_BSf[0]), to_heads(qkv_BSf[1]), to_heads(qkv_BSf[2]), {}, 0, /*is_causal=*/true);
    const at::Tensor between_BSD =
        x_BSD + row_parallel(y_BhSK.transpose(1, 2).flatten(2), weight("attention.o_proj"),
                             bias("attention.o_proj"), ranks);

    const at::Tensor up_BSf = column_parallel(norm(between_BSD, mine, prefix + "mlp_norm."),
                                              {weight("mlp.up_proj")}, {bias("mlp.up_proj")}, ranks)[0];
    return between_BSD +
           row_parallel(at::gelu(up_BSf, "tanh"), weight("mlp.down_proj"), bias("mlp.down_proj"), ranks);
}

}  // namespace fived
