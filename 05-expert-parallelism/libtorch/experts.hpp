// The experts of a rank on rows that lie sorted by expert: Experts of common/models/moe.py with its backward pass.
//
//     u = x up^T + b      h = gelu(u), or with a gate h = silu(g) u      y = h down^T + b        by each row's own expert
//
// All rows are in one tensor on the way: the products are written by each expert in its run of rows, what is between them is
// one call for all. Backward the weights' gradients are written where they stay, [e, out, in]; h is computed again.
//
// R rows  D width  F width of an expert  e experts of this rank
#pragma once

#include <string>
#include <vector>

#include "fived/torch/parameters.hpp"

namespace fived {

using Counts = std::vector<std::int64_t>;

/// rows_RD sorted by expert, counts_e of them for each, to [R, D]. Under `prefix` there are up_proj and down_proj, gate_proj
/// or not, weight_eOI with a bias_eO or without. The backward pass is not differentiable. Throws std::invalid_argument for
/// counts that do not fit rows or weights.
at::Tensor experts(const at::Tensor& rows_RD, const Counts& counts_e, const Parameters& mine,
                   const std::string& prefix);

/// Throws std::runtime_error in a backward pass that is itself recorded.
void refuse_second_derivative();

}  // namespace fived
