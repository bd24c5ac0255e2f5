// Expert parallelism on LibTorch: whole experts on ranks; each token travels to its experts and back, and none is dropped
// (Lepikhin et al., "GShard", 2020, arXiv:2006.16668, section 3; Gale et al., "MegaBlocks", 2022, arXiv:2211.15841).
//
//     x_TD ─spread─► rows by expert ─dispatch─► rows of all ranks ─experts─► results ─collect─► rows ─combine─► y_TD
//
//     spread      row r is the token of choice r                                adjoint: a token's rows, summed
//     dispatch    the ranks say how many rows come for each expert; all-to-all; from by-sender to by-expert order
//     collect     the way back: its adjoint is dispatch, and dispatch's is collect, with the counts that are known
//     combine     y_t = sum over its k rows of w_tk row                         adjoint: row <- w_tk dy_t, w_tk <- row . dy_t
//
//     const Parameters mine = split_experts(whole, *ranks);               // whole experts; all else on every rank
//     y_BSD = mixture(x_BSD, mine, "layers.0.mlp.", 2, Weights::renormalised, ranks);      // x: this rank's own tokens
//     ...                                                                 // as many passes as on all other ranks
//     sum_gradients(mine, *ranks);                                        // those of experts are complete where they are
//
// Cost: a rank sends s rows to others and returns the r that came, forward and backward: 2 (s + r) D numbers, and 8 bytes
// for each expert of others. Memory of the experts, their gradients and states: 1/n.
//
// T tokens of this rank  D width  E experts, e of this rank  K choices of a token  R = T K rows  n ranks
#pragma once

#include <array>
#include <string>

#include "experts.hpp"
#include "fived/named.hpp"
#include "fived/torch/ranks.hpp"

namespace fived {

/// A choice's weight: the softmax over all experts (Switch), or divided by the sum of the token's k (Mixtral).
enum class Weights { softmax, renormalised };
constexpr auto names(Weights) {
    return std::array{"softmax", "renormalised"};
}

/// How many of E experts rank r of n holds; numbers differ by one at the most, the larger ones first.
constexpr std::int64_t experts_of(std::int64_t E, int n, int r) {
    return E / n + (r < E % n);
}
/// Throws std::invalid_argument where n ranks cannot each hold an expert.
void check_split(std::int64_t E, int n);
/// Throws std::invalid_argument where a token cannot choose k of E experts.
void check_choices(std::int64_t k, std::int64_t E);

/// Whether the parameter of that name is stacked by expert, on dimension 0.
bool is_expert(const std::string& name);
/// What this rank has of it: of an expert's parameter its experts, else the whole; a view.
at::Tensor piece_of(const at::Tensor& whole, const std::string& name, const Ranks& ranks);
/// That of each parameter: new leaves. All ranks must hold the same `whole`. Throws as check_split does.
Parameters split_experts(const Parameters& whole, const Ranks& ranks);

/// Who sends how many rows to whom.
class Exchange final : public torch::CustomClassHolder {
  public:
    /// Of this rank's rows counts_E are for each expert. Collective. Throws as check_split does.
    Exchange(const at::Tensor& counts_E, RanksPtr ranks);
    /// Rows that come for each expert of this rank.
    const Counts& counts() const { return counts_e_; }
    /// Rows that this rank has to send.
    std::int64_t rows() const;
    /// Rows to other ranks' experts and from other ranks.
    std::int64_t moved() const;
    /// rows_RD by expert of all, to what all ranks have for this rank's experts, by expert. Collective, without autograd.
    at::Tensor there(const at::Tensor& rows_RD) const;
    /// The other way.
    at::Tensor back(const at::Tensor& results_RD) const;

  private:
    at::Tensor travelled(const at::Tensor& rows, const Counts& to, const Counts& from) const;

    RanksPtr ranks_;
    Counts send_, receive_;  // rows to and from each rank
    Counts blocks_ne_;       // rows of rank i for expert j of this rank
    Counts counts_e_;
};
using ExchangePtr = c10::intrusive_ptr<Exchange>;

/// Exchange::there and back with their gradients. Backward collective, too, and not differentiable. Throw
/// std::invalid_argument for another number of rows than the exchange's.
at::Tensor dispatch(const at::Tensor& rows_RD, const ExchangePtr& exchange);
at::Tensor collect(const at::Tensor& results_RD, const ExchangePtr& exchange);

/// Rows sorted by expert, counts_E of them for each, through the experts of all ranks, in the same order: `compute` of
/// common/models/moe.py. `mine` has under `prefix` what split() left. Adds the rows that moved to `moved`, if given.
/// Collective.
at::Tensor compute(const at::Tensor& rows_RD, const at::Tensor& counts_E, const Parameters& mine,
                   const std::string& prefix, const RanksPtr& ranks, std::int64_t* moved = nullptr);

/// The mixture of common/models/moe.py, dropless, on this rank's tokens: x_BSD to [B, S, D]. The router scores in float32 at
/// least. Appends what fell on each expert to `counts` and adds the rows that moved to `moved`, if given. Collective, and so
/// is its backward pass. Throws as check_choices and check_split do.
at::Tensor mixture(const at::Tensor& x_BSD, const Parameters& mine, const std::string& prefix, int k,
                   Weights weights, const RanksPtr& ranks, std::vector<at::Tensor>* counts = nullptr,
                   std::int64_t* moved = nullptr);

/// After the last backward pass: sums over ranks the gradients of what all hold, as one message. Collective. Throws
/// std::invalid_argument where one is missing.
void sum_gradients(const Parameters& mine, Ranks& ranks);

}  // namespace fived
