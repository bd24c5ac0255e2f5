#include "sp_libtorch.hpp"

#include <cmath>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include "fived/torch/torch.hpp"

namespace fived {

namespace {

using torch::autograd::AutogradContext;

// One block: H / G query heads read a head of keys, so their queries are rows of one product.

at::Tensor rows(const at::Tensor& x_BHS, std::int64_t heads) {
    return x_BHS.unflatten(1, {heads, -1}).flatten(2, 3);  // [B, G, H/G S, ...]
}

at::Tensor scores(const at::Tensor& q_BGRK, const at::Tensor& k_BGTK, bool causal) {
    at::Tensor scores_BGRT = q_BGRK.matmul(k_BGTK.transpose(-1, -2)).div_(std::sqrt(double(q_BGRK.size(-1))));
    if (causal) {
        const std::int64_t T = k_BGTK.size(2);
        const at::Tensor later_TT = at::ones({T, T}, q_BGRK.options().dtype(at::kBool)).triu_(1);
        scores_BGRT.unflatten(2, {-1, T}).masked_fill_(later_TT, -std::numeric_limits<double>::infinity());
    }
    return scores_BGRT;
}

/// (o_BHSK, lse_BHS)
std::tuple<at::Tensor, at::Tensor> block_forward(Kernel kernel, const at::Tensor& q, const at::Tensor& k,
                                                 const at::Tensor& v, bool causal) {
    if (kernel == Kernel::library) return at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0, causal);
    at::Tensor scores_BGRT = scores(rows(q, k.size(1)), k, causal);
    const at::Tensor lse_BGR = scores_BGRT.logsumexp(-1);
    const at::Tensor o_BGRK = scores_BGRT.sub_(lse_BGR.unsqueeze(-1)).exp_().matmul(v);
    return {o_BGRK.reshape(q.sizes()), lse_BGR.reshape(q.sizes().slice(0, 3))};
}

/// (dq, dk, dv) of the block, from the o and lse of all keys: p = exp(scores - lse), dv = p^T do,
/// ds = p (do v^T - rowsum(do o)) / sqrt(K), dq = ds k, dk = ds^T q.
std::tuple<at::Tensor, at::Tensor, at::Tensor> block_backward(Kernel kernel, const at::Tensor& d_o,
                                                              const at::Tensor& q, const at::Tensor& o,
                                                              const at::Tensor& lse, const at::Tensor& k,
                                                              const at::Tensor& v, bool causal) {
    if (kernel == Kernel::library)
        return at::_scaled_dot_product_flash_attention_for_cpu_backward(d_o, q, k, v, o, lse, 0, causal);
    const std::int64_t G = k.size(1);
    const at::Tensor q_BGRK = rows(q, G), do_BGRK = rows(d_o, G);
    const at::Tensor p_BGRT = scores(q_BGRK, k, causal).sub_(rows(lse, G).unsqueeze(-1)).exp_();
    const at::Tensor delta_BGR1 = rows((d_o * o).sum(-1), G).unsqueeze(-1);
    const at::Tensor ds_BGRT =
        do_BGRK.matmul(v.transpose(-1, -2)).sub_(delta_BGR1).mul_(p_BGRT).div_(std::sqrt(double(q.size(-1))));
    return {ds_BGRT.matmul(k).reshape(q.sizes()), ds_BGRT.transpose(-1, -2).matmul(q_BGRK),
            p_BGRT.transpose(-1, -2).matmul(do_BGRK)};
}

/// Adds a block of keys to (o, lse), in place.
void merge(const at::Tensor& o, const at::Tensor& lse, const at::Tensor& more, const at::Tensor& more_lse) {
    o.lerp_(more.to(o.scalar_type()), at::sigmoid(more_lse - lse).unsqueeze(-1).to(o.scalar_type()));
    lse.copy_(at::logaddexp(lse, more_lse));
}

// Two tensors may be on their way at once.
constexpr int keys_values_tag = 0, gradients_tag = 1;

/// x on its way to the next rank, another tensor on its way here, into `into`; both stay as they are until arrived().
class Passing {
  public:
    Passing(Ranks& ranks, at::Tensor x, at::Tensor into, int tag)
        : ranks_(ranks),
          sent_(std::move(x)),
          into_(std::move(into)),
          pending_(ranks.exchange(sent_, (ranks.rank() + 1) % ranks.size(), into_,
                                  (ranks.rank() + ranks.size() - 1) % ranks.size(), tag)) {}
    /// The received tensor, and the reusable send buffer.
    std::pair<at::Tensor, at::Tensor> arrived() {
        ranks_.wait(pending_);
        return {into_, sent_};
    }

  private:
    Ranks& ranks_;
    at::Tensor sent_, into_;
    Ranks::Pending pending_;
};

struct RingAttention : torch::autograd::Function<RingAttention> {
    struct Call {
        bool causal;
        Order order;
        Kernel kernel;
    };

    /// Own keys come first: each query sees itself among them, so that no sum of exponentials starts at 0.
    static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v, const Call& call, const RanksPtr& ranks) {
        const int n = ranks->size(), r = ranks->rank();
        const std::int64_t s = q.size(2);
        at::Tensor kv = at::stack({k, v}), spare = n > 1 ? at::empty_like(kv) : kv;  // one message
        at::Tensor o, lse;
        for (int t = 0; t < n; ++t) {
            std::optional<Passing> passing;
            if (t < n - 1) passing.emplace(*ranks, kv, spare, keys_values_tag);
            const Work w = work(call.order, call.causal, r, (r + n - t) % n, s);
            if (t == 0) {
                std::tie(o, lse) = block_forward(call.kernel, q, kv[0], kv[1], w.causal);
                o = o.to(at::promote_types(o.scalar_type(), at::kFloat));
            } else if (w.any()) {
                const auto mine = [&](const at::Tensor& x) { return x.slice(2, w.first_query); };
                const auto seen = [&](const at::Tensor& x) { return x.slice(2, 0, w.keys); };
                const auto [more, more_lse] =
                    block_forward(call.kernel, mine(q), seen(kv[0]), seen(kv[1]), w.causal);
                merge(mine(o), mine(lse), more, more_lse);
            }
            if (passing) std::tie(kv, spare) = passing->arrived();
        }
        o = o.to(q.scalar_type());
        context->save_for_backward({q, k, v, o, lse});
        context->saved_data["ranks"] = at::IValue::make_capsule(ranks);
        context->saved_data["causal"] = call.causal;
        context->saved_data["order"] = std::int64_t(call.order);
        context->saved_data["kernel"] = std::int64_t(call.kernel);
        return o;
    }

    /// Once more round the ring. The own dk and dv stay; those of others arrive, get this rank's share, and go on.
    static Tensors backward(AutogradContext* context, const Tensors& gradients) {
        if (at::GradMode::is_enabled())
            throw std::runtime_error(
                "the backward pass of ring_attention has no derivative: leave create_graph out");
        const auto kept = [&](const char* name) { return context->saved_data.at(name); };
        const RanksPtr ranks = c10::static_intrusive_pointer_cast<Ranks>(kept("ranks").toCapsule());
        const Kernel kernel = Kernel(kept("kernel").toInt());
        const Tensors saved = context->get_saved_variables();
        const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &o = saved[3], &lse = saved[4];
        const at::Tensor d_o = gradients[0].contiguous();
        const int n = ranks->size(), r = ranks->rank();
        const std::int64_t s = q.size(2);
        at::Tensor kv = at::stack({k, v}), spare, dkv, dkv_spare, dq, own_dk, own_dv;
        if (n > 1) spare = at::empty_like(kv), dkv = at::zeros_like(kv), dkv_spare = at::empty_like(kv);
        std::optional<Passing> homeward;
        for (int t = 0; t < n; ++t) {
            std::optional<Passing> passing;
            if (t < n - 1) passing.emplace(*ranks, kv, spare, keys_values_tag);
            const Work w = work(Order(kept("order").toInt()), kept("causal").toBool(), r, (r + n - t) % n, s);
            const auto mine = [&](const at::Tensor& x) { return x.slice(2, w.first_query); };
            const auto seen = [&](const at::Tensor& x) { return x.slice(2, 0, w.keys); };
            at::Tensor more, dk, dv;
            if (w.any())
                std::tie(more, dk, dv) = block_backward(kernel, mine(d_o), mine(q), mine(o), mine(lse),
                                                        seen(kv[0]), seen(kv[1]), w.causal);
            if (t == 0) {
                dq = more, own_dk = dk, own_dv = dv;
            } else {
                if (homeward) std::tie(dkv, dkv_spare) = homeward->arrived();
                if (w.any()) mine(dq).add_(more), seen(dkv[0]).add_(dk), seen(dkv[1]).add_(dv);
                homeward.emplace(*ranks, dkv, dkv_spare, gradients_tag);
            }
            if (passing) std::tie(kv, spare) = passing->arrived();
        }
        if (homeward) {
            const at::Tensor from_others = homeward->arrived().first;
            own_dk.add_(from_others[0]), own_dv.add_(from_others[1]);
        }
        return {dq, own_dk, own_dv, {}, {}};
    }
};

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Order order, Kernel kernel) {
    std::ostringstream why;
    why << "ring_attention: q " << q.sizes() << ", k " << k.sizes() << ", v " << v.sizes();
    if (q.dim() != 4 || k.dim() != 4 || k.sizes() != v.sizes() || q.size(0) != k.size(0) ||
        q.size(2) != k.size(2) || q.size(3) != k.size(3) || k.size(1) < 1 || q.size(1) % k.size(1))
        throw std::invalid_argument(
            why.str() + "; needed are [B, H, s, K], [B, G, s, K] and the same, H a multiple of G");
    if (q.size(2) < 1 || (order == Order::zigzag && q.size(2) % 2))
        throw std::invalid_argument("ring_attention: " + std::to_string(q.size(2)) +
                                    " positions a rank; at least 1, and in zigzag order two equal chunks");
    if (kernel == Kernel::library && !q.is_cpu())
        throw std::invalid_argument("ring_attention: the kernel 'library' runs on CPUs, not on " +
                                    q.device().str() + "; take 'plain'");
}

}  // namespace

Work work(Order order, bool causal, int rank, int owner, std::int64_t s) {
    if (!causal || owner == rank) return {0, s, causal};
    if (order == Order::contiguous) return {0, owner < rank ? s : 0};
    // Owned by a rank before: its early half lies before all queries, its late half behind. By one after: between ours.
    return owner < rank ? Work{0, s / 2} : Work{s / 2, s};
}

at::Tensor places(std::int64_t sequence, Order order, int rank, int n) {
    const std::int64_t chunks = order == Order::zigzag ? 2 * n : n, s = sequence / chunks;
    if (sequence < 1 || sequence % chunks) {
        const std::string below = s > 0 ? std::to_string(s * chunks) + " or " : "";
        throw std::invalid_argument("a sequence of " + std::to_string(sequence) +
                                    " positions does not divide into " + std::to_string(chunks) +
                                    " chunks; " + below + std::to_string((s + 1) * chunks) + " would");
    }
    const at::Tensor early = at::arange(rank * s, (rank + 1) * s);
    return order == Order::contiguous ? early : at::cat({early, early + (chunks - 1 - 2 * rank) * s});
}

at::Tensor ring_attention(const at::Tensor& q_BHsK, const at::Tensor& k_BGsK, const at::Tensor& v_BGsK,
                          bool causal, const RanksPtr& ranks, Order order, Kernel kernel) {
    check(q_BHsK, k_BGsK, v_BGsK, order, kernel);
    return RingAttention::apply(q_BHsK, k_BGsK, v_BGsK, RingAttention::Call{causal, order, kernel}, ranks);
}

}  // namespace fived
