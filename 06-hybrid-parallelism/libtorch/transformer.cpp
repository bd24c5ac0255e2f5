#include "transformer.hpp"

#include <algorithm>
#include <set>

#include "fived/math/partition.hpp"
#include "fived/torch/torch.hpp"
#include "region.hpp"
#include "tp_libtorch.hpp"

namespace fived {

std::vector<std::pair<std::string, std::vector<std::int64_t>>> Shape::parameters() const {
    const std::int64_t D = width, F = mlp_width, K = D / heads, E = experts;
    std::vector<std::pair<std::string, std::vector<std::int64_t>>> all;
    const auto norm = [&](const std::string& name) {
        all.push_back({name + ".weight", {D}});
        if (!llama) all.push_back({name + ".bias", {D}});
    };
    const auto linear = [&](const std::string& name, std::int64_t out, std::int64_t in,
                            bool of_experts = false) {
        std::vector<std::int64_t> weight{out, in}, bias{out};
        if (of_experts) weight.insert(weight.begin(), E), bias.insert(bias.begin(), E);
        all.push_back({name + ".weight", weight});
        if (!llama) all.push_back({name + ".bias", bias});
    };
    all.push_back({"embed_tokens.weight", {vocabulary, D}});
    if (!llama) all.push_back({"embed_positions.weight", {longest, D}});
    for (int l = 0; l < layers; ++l) {
        const std::string layer = "layers." + std::to_string(l) + ".", attention = layer + "attention.";
        norm(layer + "attention_norm");
        linear(attention + "q_proj", D, D);
        linear(attention + "k_proj", kv_heads * K, D);
        linear(attention + "v_proj", kv_heads * K, D);
        linear(attention + "o_proj", D, D);
        norm(layer + "mlp_norm");
        if (E) all.push_back({layer + "mlp.router.weight", {E, D}});
        const std::string mlp = layer + (E ? "mlp.experts." : "mlp.");
        if (llama) linear(mlp + "gate_proj", F, D, E);
        linear(mlp + "up_proj", F, D, E);
        linear(mlp + "down_proj", D, F, E);
    }
    norm("norm");
    if (llama) all.push_back({"lm_head.weight", {vocabulary, D}});
    return all;
}

std::int64_t Shape::parameter_count() const {
    std::int64_t count = 0;
    for (const auto& [_, sizes] : parameters()) count += c10::multiply_integers(sizes);
    return count;
}

double Shape::flop_per_token(int sequence) const {
    const double L = layers, D = width, mlps = experts ? experts_per_token : 1;
    const double matrices =
        2 * D * D * (1 + double(kv_heads) / heads) + experts * D + mlps * (llama ? 3 : 2) * D * mlp_width;
    return 6 * (L * matrices + vocabulary * D) + 12 * L * sequence * D;
}

at::Tensor shared_rows(const Shape& shape, const Ranks& tp) {
    if (shape.kv_heads % tp.size() == 0) return {};
    const int mine = shape.heads / tp.size(), K = shape.width / shape.heads;
    std::vector<int> read;  // by each query head
    for (int head = tp.rank() * mine; head < (tp.rank() + 1) * mine; ++head)
        read.push_back(head * shape.kv_heads / shape.heads);
    const std::set<int> once(read.begin(), read.end());
    const bool equally = std::ranges::all_of(
        once, [&](int head) { return std::ranges::count(read, head) * once.size() == read.size(); });
    if (equally) read.assign(once.begin(), once.end());
    Tensors rows;
    for (const int head : read) rows.push_back(at::arange(head * K, (head + 1) * K));
    return at::cat(rows);
}

namespace {

/// Turns the pair (k, k + K/2) by position * base^(-2k/K).
at::Tensor rotate(const at::Tensor& x_BHSK, const at::Tensor& positions_S, double base) {
    const std::int64_t half = x_BHSK.size(-1) / 2;
    const auto precise = x_BHSK.options().dtype(at::promote_types(x_BHSK.scalar_type(), at::kFloat));
    const at::Tensor frequency_k = at::pow(base, -at::arange(half, precise) / double(half));
    const at::Tensor angle_Sk = positions_S.to(precise.dtype().toScalarType()).unsqueeze(-1) * frequency_k;
    const at::Tensor cos = angle_Sk.cos().to(x_BHSK.scalar_type()),
                     sin = angle_Sk.sin().to(x_BHSK.scalar_type());
    const at::Tensor a = x_BHSK.narrow(-1, 0, half), b = x_BHSK.narrow(-1, half, half);
    return at::cat({a * cos - b * sin, b * cos + a * sin}, -1);
}

}  // namespace

void Transformer::use(std::int64_t sequence) {
    positions_s_ = ways_.sp->size() == 1 ? at::arange(sequence)
                                         : places(sequence, ways_.order, ways_.sp->rank(), ways_.sp->size());
}

Range Transformer::outside(std::int64_t s) const {
    return ways_.sequence_parallel ? shard_of(std::size_t(s), ways_.tp->size(), ways_.tp->rank())
                                   : Range{0, std::size_t(s)};
}

at::Tensor Transformer::enter(const at::Tensor& x) const {
    return ways_.sequence_parallel ? gather(x, positions_s_.size(0), ways_.tp) : copy(x, ways_.tp);
}

at::Tensor Transformer::leave(const at::Tensor& x) const {
    return ways_.sequence_parallel ? reduce_scatter(x, ways_.tp) : reduce(x, ways_.tp);
}

at::Tensor Transformer::norm(const at::Tensor& x, const std::string& name) const {
    if (!shape_.llama) return fived::norm(x, mine, name + ".");
    return at::rms_norm(x, {x.size(-1)}, find(mine, name + ".weight"), 1e-5);
}

Tensors Transformer::columns(const at::Tensor& x, const std::vector<std::string>& names) const {
    Tensors weights, biases;
    for (const std::string& name : names) {
        at::Tensor weight = find(mine, name + ".weight"), bias;
        if (mine.contains(name + ".bias")) bias = find(mine, name + ".bias");
        if (name.ends_with("k_proj") || name.ends_with("v_proj"))
            if (const at::Tensor rows = shared_rows(shape_, *ways_.tp); rows.defined()) {
                weight = copy(weight, ways_.tp).index_select(0, rows);
                if (bias.defined()) bias = copy(bias, ways_.tp).index_select(0, rows);
            }
        weights.push_back(weight);
        if (bias.defined()) biases.push_back(bias);
    }
    if (!ways_.sequence_parallel) return column_parallel(x, weights, biases, ways_.tp, deferred_);
    return column_parallel(enter(x), weights, biases, one_rank_, deferred_);
}

at::Tensor Transformer::rows(const at::Tensor& x, const std::string& name) const {
    const at::Tensor bias = mine.contains(name + ".bias") ? find(mine, name + ".bias") : at::Tensor();
    const at::Tensor& weight = find(mine, name + ".weight");
    if (!ways_.sequence_parallel) return row_parallel(x, weight, bias, ways_.tp, deferred_);
    const at::Tensor y = leave(row_parallel(x, weight, {}, one_rank_, deferred_));
    return bias.defined() ? y + bias : y;
}

at::Tensor Transformer::attention(const at::Tensor& x, const std::string& prefix) const {
    const Tensors qkv = columns(x, {prefix + "q_proj", prefix + "k_proj", prefix + "v_proj"});
    const auto heads = [&](const at::Tensor& x_Bsf) {  // as many as this rank has
        return x_Bsf.unflatten(-1, {-1, shape_.width / shape_.heads}).transpose(1, 2);
    };
    at::Tensor q_BHsK = heads(qkv[0]), k_BGsK = heads(qkv[1]);
    const at::Tensor v_BGsK = heads(qkv[2]);
    if (shape_.llama) {
        q_BHsK = rotate(q_BHsK, positions_s_, shape_.rotary_base);
        k_BGsK = rotate(k_BGsK, positions_s_, shape_.rotary_base);
    }
    const bool grouped = q_BHsK.size(1) != k_BGsK.size(1);
    const at::Tensor y_BHsK =
        ways_.sp->size() > 1
            ? ring_attention(q_BHsK, k_BGsK, v_BGsK, true, ways_.sp, ways_.order, ways_.kernel)
            : at::scaled_dot_product_attention(q_BHsK, k_BGsK, v_BGsK, {}, 0, /*is_causal=*/true, {},
                                               grouped);
    return rows(y_BHsK.transpose(1, 2).flatten(2), prefix + "o_proj");
}

at::Tensor Transformer::mlp(const at::Tensor& x, const std::string& prefix) const {
    if (shape_.experts)  // each rank along tp has a slice of every expert: the weighted sum is partial
        return leave(mixture(enter(x), of_mixture(prefix), prefix, shape_.experts_per_token,
                             Weights::renormalised, ways_.ep, &counts, &moved));
    if (!shape_.llama)
        return rows(at::gelu(columns(x, {prefix + "up_proj"})[0], "tanh"), prefix + "down_proj");
    const Tensors gate_up = columns(x, {prefix + "gate_proj", prefix + "up_proj"});
    return rows(at::silu(gate_up[0]) * gate_up[1], prefix + "down_proj");
}

/// Its parameters; of the last bias this rank's share, since the ranks along tp each add it.
Parameters Transformer::of_mixture(const std::string& prefix) const {
    Parameters part;
    for (auto p = mine.lower_bound(prefix); p != mine.end() && p->first.starts_with(prefix); ++p)
        part.insert(*p);
    const auto bias = part.find(prefix + "experts.down_proj.bias");
    if (bias != part.end() && ways_.tp->size() > 1) bias->second = bias->second / ways_.tp->size();
    return part;
}

at::Tensor Transformer::embed(const at::Tensor& tokens_Bs) const {
    const at::Tensor x =
        leave(partial_embedding(tokens_Bs, find(mine, "embed_tokens.weight"), shape_.vocabulary, *ways_.tp));
    if (shape_.llama) return x;
    const Range part = outside(tokens_Bs.size(1));
    const at::Tensor positions = positions_s_.narrow(0, std::int64_t(part.begin), std::int64_t(part.length));
    return x + at::embedding(find(mine, "embed_positions.weight"), positions);
}

at::Tensor Transformer::forward(at::Tensor x, int begin, int end) const {
    if (begin == 0) x = embed(x);
    for (int l = begin; l < end; ++l) {
        const std::string layer = "layers." + std::to_string(l) + ".";
        x = x + attention(norm(x, layer + "attention_norm"), layer + "attention.");
        x = x + mlp(norm(x, layer + "mlp_norm"), layer + "mlp.");
    }
    if (end < shape_.layers) return x;
    return columns(norm(x, "norm"), {shape_.llama ? "lm_head" : "embed_tokens"})[0];
}

at::Tensor Transformer::loss(const at::Tensor& logits_Bsv, const at::Tensor& targets_Bs) const {
    return cross_entropy_sum(logits_Bsv, targets_Bs, shape_.vocabulary, ways_.tp).first;
}

}  // namespace fived
