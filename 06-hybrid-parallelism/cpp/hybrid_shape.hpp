// The shape of a GPT-2, and a micro-batch of one rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fived {

/// Radford et al., "Language models are unsupervised multitask learners" (2019).
struct ModelShape {
    std::size_t layers = 1, width = 1, heads = 1, longest = 1, vocabulary = 256;
    double epsilon = 1e-5;

    std::size_t head_width() const { return width / heads; }
    std::size_t mlp_width() const { return 4 * width; }
    /// Numbers of all parameters.
    std::size_t parameters() const {
        const std::size_t D = width;
        return (vocabulary + longest) * D + layers * (12 * D * D + 13 * D) + 2 * D;
    }
    /// Operations of a token, forward and backward, as Transformer.flops_per_token counts them.
    double flop_per_token(std::size_t sequence) const {
        const double D = double(width), L = double(layers);
        return 6 * (12 * L * D * D + double(vocabulary) * D) + 12 * L * double(sequence) * D;
    }
};

/// This rank's tokens of some samples, sample after sample.
struct MicroBatch {
    std::size_t samples = 0;
    std::vector<std::int64_t> tokens, targets, positions;

    std::size_t size() const { return tokens.size(); }
};

}  // namespace fived
