// The shape of a GPT-2, with experts or without, and a micro-batch of one rank.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ep_kernels.hpp"

namespace fived {

/// Radford et al., "Language models are unsupervised multitask learners" (2019).
struct ModelShape {
    std::size_t layers = 1, width = 1, heads = 1, longest = 1;
    std::size_t experts = 0, experts_per_token = 2;  // 0: an MLP
    Weights router = Weights::renormalised;
    std::size_t vocabulary = 256;
    double epsilon = 1e-5;

    std::size_t head_width() const { return width / heads; }
    /// Of the MLP, or of each expert.
    std::size_t mlp_width() const { return 4 * width; }
    /// Numbers of all parameters.
    std::size_t parameters() const {
        const std::size_t D = width, mlp = 2 * D * mlp_width() + mlp_width() + D;
        const std::size_t layer = 4 * D * D + 8 * D + std::max<std::size_t>(experts, 1) * mlp + experts * D;
        return (vocabulary + longest) * D + layers * layer + 2 * D;
    }
    /// Operations of a token, forward and backward, as Transformer.flops_per_token counts them.
    double flop_per_token(std::size_t sequence) const {
        const double D = double(width), L = double(layers), F = double(mlp_width());
        const double mlps = experts ? double(experts_per_token) : 1;
        const double layer = 4 * D * D + mlps * 2 * D * F + double(experts) * D;
        return 6 * (L * layer + double(vocabulary) * D) + 12 * L * double(sequence) * D;
    }
};

/// This rank's tokens of some samples, sample after sample.
struct MicroBatch {
    std::size_t samples = 0;
    std::vector<std::int64_t> tokens, targets, positions;

    std::size_t size() const { return tokens.size(); }
};

}  // namespace fived
