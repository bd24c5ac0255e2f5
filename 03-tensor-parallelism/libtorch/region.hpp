// Megatron's sequence parallelism: an all-reduce is a reduce-scatter and an all-gather, and between the two, outside of the
// split layers, each rank holds a slice of the sequence (Korthikanti et al., 2022, arXiv:2205.05198, section 4.2.2).
//
//                        forward          backward
//     gather             S(1) -> R        P -> S(1)    reduce-scatter      in the place of copy
//     reduce_scatter     P -> S(1)        S(1) -> R    all-gather          in the place of reduce
//
// The same bytes travel. What is replicated outside of the layers, norms and biases, sees other tokens on each rank: the
// gradients have to be summed over the ranks.
//
// Slices differ by one token at the most (fived::range), and travel padded to the longest.
//
// B batch  S sequence, s of this rank  D width
#pragma once

#include "fived/torch/ranks.hpp"

namespace fived {

/// x_BsD, this rank's slice of a sequence of `S`, to x_BSD. Collective, and so is its backward pass.
at::Tensor gather(const at::Tensor& x_BsD, std::int64_t S, const RanksPtr& ranks);
/// x_BSD, each rank's part of a sum, to this rank's slice of the sum. Collective, and so is its backward pass.
at::Tensor reduce_scatter(const at::Tensor& x_BSD, const RanksPtr& ranks);

}  // namespace fived
