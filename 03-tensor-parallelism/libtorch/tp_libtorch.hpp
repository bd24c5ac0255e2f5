// Tensor parallelism on LibTorch: every rank holds some columns or some rows of each matrix, and all ranks the same
// activations between the layers (Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053, section 3).
//
//     x R ──copy──► q k v by columns: whole heads ──► o by rows ──reduce──► R        copy:   R -> R, adjoint all-reduce
//     x R ──copy──► up by columns ──gelu──► down by rows ───────────reduce──► R      reduce: all-reduce, adjoint R -> R
//
// Columns, backward:      dx = dy W ──────► all-reduce ──────► there        the sum travels while the gradients
//                                           dW = dy^T x, db                 of the weights are computed
//
// Every rank holds its piece of q, k, v, up, o, down and the embedding (split_dimension), whole norms, positions and biases
// of o and down, and sees all tokens. The gradients of what is whole are the same on all ranks: after the backward pass
// nothing is summed.
//
// Cost of a layer, |x| = B S D numbers: 2 all-reduces of |x| forward, 2 backward, each 2 (n-1)/n |x| a rank. Weights,
// their gradients and states take 1/n; so do the activations between columns and rows. Embedding and head cost one all-reduce
// of |x| each, the loss three numbers a token.
//
//     const Parameters mine = split(whole, *ranks);                    // q, k, v, up, o, down, the embedding: pieces
//     x_BSD = layer(x_BSD, mine, "layers.0.", heads, ranks);           // x is whole, and the same on all ranks
//
// Backward passes are not differentiable: create_graph throws. On one rank everything is torch's own.
//
// B batch  S sequence  D width  V vocabulary  N = B S tokens  F features; small letters: what a rank has of them
#pragma once

#include <string>
#include <utility>

#include "fived/torch/deferred.hpp"
#include "fived/torch/parameters.hpp"
#include "fived/torch/ranks.hpp"

namespace fived {

/// The dimension along which the parameter of that name is cut; -1 when all ranks hold the whole. Weights are [out, in]:
/// columns of the equations are rows of the tensor.
int split_dimension(const std::string& name);

/// This rank's piece along `dim`, one of pieces that differ by one at the most (fived::cut); a view.
at::Tensor piece_of(const at::Tensor& whole, int dim, const Ranks& ranks);

/// This rank's piece of each parameter: new leaves. All ranks must hold the same `whole`. Throws std::invalid_argument
/// where a rank would get nothing.
Parameters split(const Parameters& whole, const Ranks& ranks);

/// R to R; the gradients, each rank's part, are summed. Megatron's f.
at::Tensor copy(const at::Tensor& x, const RanksPtr& ranks);
/// P to R: the sum over ranks; the gradient passes as it is. Megatron's g.
at::Tensor reduce(const at::Tensor& x, const RanksPtr& ranks);

/// x_BSD to y_BSf of each weight_fD, with one sum of dx for all of them. `biases`: none, or one a weight. deferred: where
/// gradients of the weights may wait.
Tensors column_parallel(const at::Tensor& x_BSD, const Tensors& weights, const Tensors& biases,
                        const RanksPtr& ranks, const DeferredPtr& deferred = {});
/// x_BSf to y_BSD, summed over ranks; then `bias_D`, if it is defined, once.
at::Tensor row_parallel(const at::Tensor& x_BSf, const at::Tensor& weight_Df, const at::Tensor& bias_D,
                        const RanksPtr& ranks, const DeferredPtr& deferred = {});

/// tokens_BS to x_BSD, zeros for tokens whose rows other ranks have: P. Throws std::invalid_argument where weight_vD is not
/// this rank's piece of `vocabulary` rows.
at::Tensor partial_embedding(const at::Tensor& tokens_BS, const at::Tensor& weight_vD,
                             std::int64_t vocabulary, const Ranks& ranks);
/// Their sum over ranks.
at::Tensor embedding(const at::Tensor& tokens_BS, const at::Tensor& weight_vD, std::int64_t vocabulary,
                     const RanksPtr& ranks);

/// (sum of the cross-entropies in nats, number of targets) of logits split along the vocabulary, which are never
/// gathered: three numbers a token travel. Targets of `ignore_index` do not count. Throws std::invalid_argument for
/// other targets outside of the vocabulary.
std::pair<at::Tensor, at::Tensor> cross_entropy_sum(const at::Tensor& logits_BSv,
                                                    const at::Tensor& targets_BS, std::int64_t vocabulary,
                                                    const RanksPtr& ranks, std::int64_t ignore_index = -100);

/// x + attention(norm(x)), then x + mlp(norm(x)): GPT-2's layer, causal, from the pieces of `mine` whose names start
/// with `prefix`. Throws std::invalid_argument where `heads` do not divide by the ranks, or a parameter is missing.
at::Tensor layer(const at::Tensor& x_BSD, const Parameters& mine, const std::string& prefix, int heads,
                 const RanksPtr& ranks);

/// LayerNorm with the weight and bias under `prefix`.
at::Tensor norm(const at::Tensor& x_BSD, const Parameters& parameters, const std::string& prefix);

/// Throws std::invalid_argument where n ranks cannot hold equally many heads, as layer() needs. Other pieces may differ by one.
void check_heads(int heads, int n);

}  // namespace fived
