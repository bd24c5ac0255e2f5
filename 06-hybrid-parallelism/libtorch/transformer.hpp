// The Transformer of common/models/transformer.py on this rank's shards: GPT-2, LLaMA, and both with experts. The layers of
// the chapters stand where the plain model has its own; on groups of one rank they are the plain model.
//
//     x ─norm─ enter ─► q k v, whole heads ─► ring attention over sp ─► o ─ leave ─► + x        chapters 03, 04
//     x ─norm─ enter ─► up, gate ─► gelu or silu ─► down ───────────────── leave ─► + x         chapter 03
//                       or a mixture, its experts over ep                                       chapter 05
//
// B batch  S sequence, s of this rank along sp  D width  H heads  G heads of keys  K width of a head  V vocabulary, v of
// this rank along tp
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ep_libtorch.hpp"
#include "fived/math/partition.hpp"
#include "fived/torch/deferred.hpp"
#include "fived/torch/parameters.hpp"
#include "mesh.hpp"
#include "sp_libtorch.hpp"

namespace fived {

/// common/models/configs.py
struct Shape {
    int layers, width, heads, kv_heads, mlp_width;
    int longest;  ///< tokens of a sequence
    int vocabulary = 256;
    bool llama = false;  ///< RMSNorm, rotary positions, SwiGLU, no biases, a head of its own; else GPT-2
    int experts = 0, experts_per_token = 2;
    double rotary_base = 1e4;

    /// (name, sizes) of each parameter of the plain model, in its order.
    std::vector<std::pair<std::string, std::vector<std::int64_t>>> parameters() const;
    std::int64_t parameter_count() const;
    /// Operations of a token's forward and backward pass, as Transformer.flops_per_token.
    double flop_per_token(int sequence) const;
};

/// What passes along the axes inside of layers.
struct Ways {
    RanksPtr tp, sp, ep;
    bool sequence_parallel = false;  ///< Megatron's: outside of the regions a slice of the tokens
    Order order = Order::zigzag;
    Kernel kernel = Kernel::library;
};

class Transformer {
  public:
    /// deferred: where gradients of weights may wait. `mine` must hold what the layers read.
    Transformer(const Shape& shape, Ways ways, DeferredPtr deferred)
        : shape_(shape), ways_(std::move(ways)), deferred_(std::move(deferred)) {}

    /// The sequence of the next passes: which of its positions this rank has along sp.
    void use(std::int64_t sequence);
    const at::Tensor& positions() const { return positions_s_; }
    const DeferredPtr& deferred() const { return deferred_; }
    /// Layers [begin, end), the embeddings before the first, the head after the last: tokens_Bs or x_BsD to x_BsD or
    /// logits_Bsv. Collective along tp, sp and ep.
    at::Tensor forward(at::Tensor x, int begin, int end) const;
    /// The sum of the cross-entropies. Collective along tp.
    at::Tensor loss(const at::Tensor& logits_Bsv, const at::Tensor& targets_Bs) const;
    /// Tokens of a sample that this rank has outside of the regions, of `s`.
    Range outside(std::int64_t s) const;

    Parameters mine;
    /// What fell on each expert in each pass since it was emptied.
    mutable std::vector<at::Tensor> counts{};
    /// Rows that these passes sent to other ranks' experts or got from other ranks.
    mutable std::int64_t moved = 0;

  private:
    at::Tensor enter(const at::Tensor& x) const;
    at::Tensor leave(const at::Tensor& x) const;
    at::Tensor norm(const at::Tensor& x, const std::string& name) const;
    Tensors columns(const at::Tensor& x, const std::vector<std::string>& names) const;
    at::Tensor rows(const at::Tensor& x, const std::string& name) const;
    at::Tensor attention(const at::Tensor& x, const std::string& prefix) const;
    at::Tensor mlp(const at::Tensor& x, const std::string& prefix) const;
    Parameters of_mixture(const std::string& prefix) const;
    at::Tensor embed(const at::Tensor& tokens_Bs) const;

    Shape shape_;
    Ways ways_;
    RanksPtr one_rank_ = c10::make_intrusive<Ranks>(Group());
    DeferredPtr deferred_;
    at::Tensor positions_s_;
};

/// The rows of k_proj and v_proj that this rank's query heads read, where ranks along tp share heads of keys; else undefined.
at::Tensor shared_rows(const Shape& shape, const Ranks& tp);

}  // namespace fived
