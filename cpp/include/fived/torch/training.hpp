// What the chapters on LibTorch train: GPT-2 as common/models/transformer.py has it, with the same initial weights and the
// same samples for the same seed.
//
// B batch  S sequence  D width  V vocabulary
#pragma once

#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "fived/lesson/training.hpp"
#include "fived/math/random.hpp"
#include "fived/torch/ranks.hpp"
#include "fived/torch/torch.hpp"

namespace fived {

constexpr int vocabulary = 256;  // the values of a byte

/// Radford et al., "Language models are unsupervised multitask learners" (2019).
struct Gpt2Shape {
    int layers, width, heads;
    int longest;  // learned positions
    int vocabulary = fived::vocabulary;

    /// Operations of a token's forward and backward pass, 2 a multiply-add; attention as if its masked half counted.
    double flop_per_token(int sequence) const {
        const double L = layers, D = width;
        return 6 * (12 * L * D * D + vocabulary * D) + 12 * L * sequence * D;
    }
};

/// What these binaries can train; each offers some. mlp: of dp_libtorch alone.
enum class ModelKind { gpt2_tiny, gpt2_deep, gpt2_10m, mlp };
constexpr auto names(ModelKind) {
    return std::array{"gpt2-tiny", "gpt2-deep", "gpt2-10m", "mlp"};
}

inline at::ScalarType torch_type(Dtype dtype) {
    return dtype == Dtype::float64 ? at::kDouble : at::kFloat;
}

struct TorchTrainingSettings : TrainingSettings {
    ModelKind model = ModelKind::gpt2_tiny;
    int sequence = 32;

    at::ScalarType type() const { return torch_type(dtype); }
    Gpt2Shape shape() const {
        if (model == ModelKind::gpt2_10m) return {6, 384, 6, 256};
        return model == ModelKind::gpt2_deep ? Gpt2Shape{16, 32, 2, 64} : Gpt2Shape{2, 64, 4, 64};
    }
    double tokens() const { return double(batch) * sequence; }
    double targets() const { return double(count_targets(batch, sequence)); }
    /// Operations of a step.
    double flop() const { return tokens() * shape().flop_per_token(sequence); }
    void check_sequence() const {
        if (sequence > shape().longest)
            throw UsageError("--sequence " + std::to_string(sequence) + " is too long for " + name_of(model) +
                             "; at most " + std::to_string(shape().longest));
        check_sample(sequence);
    }
};

/// float64, number(k) for each of the elements.
template <class Number>
at::Tensor filled(at::IntArrayRef sizes, Number number) {
    const at::Tensor values = at::empty(sizes, at::kDouble);
    double* v = values.data_ptr<double>();
    for (std::int64_t k = 0; k < values.numel(); ++k) v[k] = number(std::uint64_t(k));
    return values;
}

/// GPT-2's parameter of that name. Biases 0, norms 1, weights N(0, 0.02^2), those that add to the residual stream smaller.
inline at::Tensor initial_value(const std::string& name, at::IntArrayRef sizes, int layers,
                                std::uint64_t seed) {
    if (name.ends_with("bias")) return at::zeros(sizes, at::kDouble);
    if (name.ends_with("norm.weight")) return at::ones(sizes, at::kDouble);
    const bool residual = name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
    const double std = residual ? 0.02 / std::sqrt(2 * layers) : 0.02;
    const std::uint64_t stream = stream_of(name);
    return filled(sizes, [&](std::uint64_t k) { return normal(seed, stream, k) * std; });
}

/// Samples [begin, end) of the global batch of `step`: tokens_BS and targets_BS, the byte that follows each.
inline std::pair<at::Tensor, at::Tensor> lm_batch(const Text& text, std::uint64_t seed, int step,
                                                  std::size_t begin, std::size_t end, int sequence) {
    const auto empty = [&] { return at::empty({std::int64_t(end - begin), sequence}, at::kLong); };
    const at::Tensor tokens_BS = empty(), targets_BS = empty();
    const auto view = [&](const at::Tensor& t) {
        return MatrixView<std::int64_t>(t.data_ptr<std::int64_t>(), end - begin, std::size_t(sequence));
    };
    lm_samples(text.train, seed, step, begin, view(tokens_BS), view(targets_BS));
    return {tokens_BS, targets_BS};
}

/// As in common/lesson/equality.py. Another optimizer of torch is another OptimizerKind and a line here.
inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(OptimizerKind kind, const Tensors& tensors) {
    if (kind == OptimizerKind::sgd)
        return std::make_unique<torch::optim::SGD>(tensors, torch::optim::SGDOptions(0.1));
    return std::make_unique<torch::optim::AdamW>(tensors, torch::optim::AdamWOptions(1e-3).eps(1e-5));
}

}  // namespace fived
