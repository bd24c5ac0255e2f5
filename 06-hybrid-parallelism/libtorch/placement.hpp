// Placement of a parameter on each axis, and the one rule from which synchronisation follows: common/comm/placement.py.
//
//     A gradient is summed over exactly the axes along which tokens are split and its parameter is replicated.
//     A parameter counts once in the gradient norm.
//
//                                  cut along                          tokens split along
//     q k v up gate embed head     tp, rows                           dp ep sp
//     o down                       tp, columns                        dp ep sp
//     of experts                   ep, whole experts; tp, as above    dp ep sp
//     norms, positions, biases     -                                  dp ep sp, with sequence parallelism tp
//     router                       -                                  dp ep sp tp: each rank weights a partial result
//     last bias of experts         ep                                 dp ep sp tp: each rank adds its share
//     ZeRO's shards                also all axes of the rule, of the flat tensor
#pragma once

#include <string>
#include <vector>

#include "fived/torch/torch.hpp"
#include "mesh.hpp"

namespace fived {

/// This rank holds `length` of dimension `dim` from `begin` on; other ranks along `axes` hold the rest.
struct Cut {
    Axes axes;
    int dim;  ///< -1: of the flattened tensor
    std::int64_t begin, length;
};

struct Placement {
    std::vector<Cut> cuts{};   ///< in the order in which they are made; all other axes replicate
    Axes tokens = token_axes;  ///< along which each rank uses the parameter on other tokens
    RanksPtr tied{};           ///< who holds it together, though their axis splits the others; null: nobody

    /// Along which it is cut, one by one.
    Axes cut_along() const;
    /// The rule.
    Axes gradient_axes() const;
    /// This rank's piece of the whole; a view.
    at::Tensor piece(at::Tensor whole) const;
    /// On how many ranks of the mesh the same numbers lie.
    int copies(const Mesh& mesh) const;
};

/// A parameter of this rank, under its name in the whole model.
struct Placed {
    std::string name;
    at::Tensor tensor;
    Placement placement;
};

/// Sums every gradient over its axes, in place: one message for all with the same axes and cuts. Collective. A parameter
/// without a gradient takes part with zeros.
void sum_gradients(const std::vector<Placed>& parameters, Mesh& mesh);
/// Sums each tied parameter's gradient over the ranks that hold it. Collective.
void sum_tied_gradients(const std::vector<Placed>& parameters);

/// This rank's share of the squares, such that the sum over the world counts each parameter once.
double squares(const std::vector<Placed>& parameters, const Mesh& mesh);
/// Scales the gradients so that their norm is at most `largest`, as torch.nn.utils.clip_grad_norm_; returns the norm before.
/// Collective.
double clip_gradients(const std::vector<Placed>& parameters, Mesh& mesh, double largest);

/// Waits.
void all_reduce(const at::Tensor& x, Ranks& ranks);

}  // namespace fived
