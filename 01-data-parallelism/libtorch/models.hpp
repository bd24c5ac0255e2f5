// What dp_libtorch trains, in torch::nn: GPT-2 and the MLP. They know nothing of ranks. transformer.py and mlp.py in
// common/models are the same models: the same names, the same initial weights for the same seed.
//
// B batch  S sequence  I inputs
#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fived/torch/gpt2.hpp"
#include "fived/torch/torch.hpp"

namespace fived {

struct Model : torch::nn::Module {
    virtual at::Tensor forward(const at::Tensor& x) = 0;
    /// Samples [begin, end) of the global batch of `step`: what forward() takes, and the target of each of its logits.
    virtual std::pair<at::Tensor, at::Tensor> samples(const Text& text, std::uint64_t seed, int step,
                                                      std::size_t begin, std::size_t end) const = 0;
    virtual int tokens() const = 0;                             ///< of one sample
    virtual std::int64_t targets(std::size_t batch) const = 0;  ///< of a global batch
    virtual double flop_per_sample() const = 0;                 ///< forward and backward, 2 a multiply-add
};

/// Linear layers with GELU between; 16 bytes as bits in, the byte that follows out.
class ByteMlp final : public Model {
  public:
    ByteMlp(int context, int hidden, int layers, std::uint64_t seed, at::ScalarType dtype)
        : context_(context) {
        for (int l = 0; l < layers; ++l)
            layers_->push_back(
                torch::nn::Linear(l == 0 ? 8 * context : hidden, l + 1 == layers ? vocabulary : hidden));
        register_module("layers", layers_);
        to(dtype);
        std::uint64_t stream = 0;  // weight 0, bias 0, weight 1, ...
        for (at::Tensor& p : parameters()) {
            if (p.dim() == 2) inputs_.push_back(p.size(1));
            const double in = double(inputs_.back()),
                         bound = p.dim() == 2 ? std::sqrt(3 / in) : 1 / std::sqrt(in);
            const at::NoGradGuard no_grad;
            p.copy_(filled(p.sizes(),
                           [&](std::uint64_t k) { return (2 * uniform(seed, stream, k) - 1) * bound; }));
            ++stream;
        }
    }
    at::Tensor forward(const at::Tensor& x_BI) override {
        at::Tensor x = x_BI;
        for (std::size_t l = 0; l < layers_->size(); ++l) {
            x = layers_[l]->as<torch::nn::Linear>()->forward(x);
            if (l + 1 < layers_->size()) x = at::gelu(x, "tanh");
        }
        return x;
    }
    std::pair<at::Tensor, at::Tensor> samples(const Text& text, std::uint64_t seed, int step,
                                              std::size_t begin, std::size_t end) const override {
        const std::int64_t B = std::int64_t(end - begin), I = 8 * context_;
        at::Tensor x_BI = at::empty({B, I}, at::kDouble), y_B = at::empty({B}, at::kByte);
        mlp_samples<double>(text.train, seed, step, begin,
                            {x_BI.data_ptr<double>(), end - begin, std::size_t(I)},
                            {y_B.data_ptr<std::uint8_t>(), end - begin});
        return {x_BI.to(parameters()[0].scalar_type()), y_B.to(at::kLong)};
    }
    int tokens() const override { return 1; }
    std::int64_t targets(std::size_t batch) const override { return std::int64_t(batch); }
    double flop_per_sample() const override {
        double weights = 0;
        for (const at::Tensor& p : parameters())
            if (p.dim() == 2) weights += double(p.numel());
        return 6 * weights -
               2 * double(parameters()[0].numel());  // the first layer needs no gradient of its input
    }

  private:
    int context_;
    std::vector<std::int64_t> inputs_;
    torch::nn::ModuleList layers_;
};

/// The whole of it, its parts registered as this module's own: their names are the plain model's.
class Gpt2 final : public Model {
  public:
    /// `sequence`: tokens of a sample.
    Gpt2(const Gpt2Shape& shape, int sequence, std::uint64_t seed, at::ScalarType dtype)
        : shape_(shape), sequence_(sequence), model_(shape) {
        for (const auto& part : model_->named_children()) register_module(part.key(), part.value());
        to(dtype);
        model_->initialise(seed);
    }
    at::Tensor forward(const at::Tensor& tokens_BS) override { return model_(tokens_BS); }
    std::pair<at::Tensor, at::Tensor> samples(const Text& text, std::uint64_t seed, int step,
                                              std::size_t begin, std::size_t end) const override {
        return lm_batch(text, seed, step, begin, end, sequence_);
    }
    int tokens() const override { return sequence_; }
    std::int64_t targets(std::size_t batch) const override {
        return count_targets(std::int64_t(batch), sequence_);
    }
    double flop_per_sample() const override { return sequence_ * shape_.flop_per_token(sequence_); }

  private:
    Gpt2Shape shape_;
    int sequence_;
    Gpt2Part model_;
};

}  // namespace fived
