// Ring attention on LibTorch: queries stay, keys and values travel round the ring, and each block of them is computed
// while the next is on its way (Liu et al., "Ring attention with blockwise Transformers", 2023, arXiv:2310.01889).
//
//     step        rank 0           rank 1           rank 2           rank 3
//     0           q0 with kv0      q1 with kv1      q2 with kv2      q3 with kv3      kv of step 1 on its way meanwhile
//     1           q0 with kv3      q1 with kv0      q2 with kv1      q3 with kv2      kv of step 2 on its way meanwhile
//     2, 3        ...
//     backward    the same steps; what each rank adds to dk and dv travels a step behind, and ends where they belong
//
// A block gives o = softmax(q k^T / sqrt(K)) v and lse = log sum exp(q k^T / sqrt(K)) over its keys; two blocks are
//     o = o1 + w (o2 - o1),  w = sigmoid(lse2 - lse1),  lse = log(exp(lse1) + exp(lse2)).
// Given the o and lse of all keys, the backward pass of a block is that of FlashAttention-2 (arXiv:2307.08691).
//
// Causal, in contiguous order, rank r works in r + 1 of the n steps, and all wait for the last. In zigzag order rank r
// holds chunks r and 2n-1-r of 2n, and every step but step 0 is half a block on every rank, with nothing masked
// (Llama 3, arXiv:2407.21783, section 3.3.2).
//
// Another order is a value of Order with its name, its positions in places(), its part of a block in work() and its
// condition on s in check(); in step 0 a rank computes its own block whole. Callers take rotary positions and targets by
// places(), too. Each rank has equally many positions, since buffers are passed on; sp_mpi has unequal ones. A mask of
// padding would go into scores() and the library's calls, by owner, and leave each query a key of its own block.
//
// There are no parameters here. Layers around it see one rank's tokens alone: their gradients have to be summed over the
// ranks.
//
// Half types: o is merged in float32, with an lse in the type that the kernel returns; dq, dk and dv are summed in the type
// of q, k and v.
//
// Cost: keys and values of one rank, 2 B G s K numbers, travel n-1 times forward and 2 (n-1) times backward, 3 (n-1) in
// all. Memory: two blocks of keys and values forward, two more of their gradients backward, whatever n is.
//
// B batch  H query heads  G heads of keys, read by H / G query heads each  s positions of a rank  K width of a head
#pragma once

#include <array>
#include <string>

#include "fived/named.hpp"
#include "fived/torch/ranks.hpp"

namespace fived {

enum class Order { contiguous, zigzag };
constexpr auto names(Order) {
    return std::array{"contiguous", "zigzag"};
}
/// Of a block: torch's FlashAttention, CPUs only; or the equations in matrix products, with all scores in memory.
enum class Kernel { library, plain };
constexpr auto names(Kernel) {
    return std::array{"library", "plain"};
}

/// The part of the block [s, s] of `rank`'s queries and `owner`'s keys that `rank` computes.
struct Work {
    std::int64_t first_query = 0, keys;  // queries from first_query on, the first `keys` keys
    bool causal = false;                 // masked: the i-th of these queries sees keys 0 to i

    bool any() const { return keys > 0; }
    /// Query-key pairs, of s positions a rank.
    std::int64_t pairs(std::int64_t s) const {
        return causal ? keys * (keys + 1) / 2 : (s - first_query) * keys;
    }
};
Work work(Order order, bool causal, int rank, int owner, std::int64_t s);

/// Positions, in rising order, that a rank holds of `sequence`. Throws std::invalid_argument where the sequence does not
/// divide by n, in zigzag order by 2n.
at::Tensor places(std::int64_t sequence, Order order, int rank, int n);

/// (q_BHsK, k_BGsK, v_BGsK) of this rank's places to o_BHsK. Collective, and so is its backward pass, which is not
/// differentiable. All ranks hold equally many positions. Throws std::invalid_argument for shapes that do not fit, an odd
/// s in zigzag order, and the library's kernel on other devices than CPUs.
at::Tensor ring_attention(const at::Tensor& q_BHsK, const at::Tensor& k_BGsK, const at::Tensor& v_BGsK,
                          bool causal, const RanksPtr& ranks, Order order, Kernel kernel);

/// Bytes that a rank sends forward and backward, for keys and values of a rank, `bytes` together.
constexpr std::int64_t ring_bytes(std::int64_t bytes, int n) {
    return 3 * (n - 1) * bytes;
}

}  // namespace fived
