// What dp_libtorch trains, in torch::nn: GPT-2 and the MLP. They know nothing of ranks. transformer.py and mlp.py in
// common/models are the same models: the same names, the same initial weights for the same seed.
//
// B batch  S sequence  D width  V vocabulary (the 256 values of a byte)  H heads  K width of a head  I inputs
#pragma once

#include <torch/all.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fived/torch_training.hpp"

namespace fived {

struct Model : torch::nn::Module {
    virtual at::Tensor forward(const at::Tensor& x) = 0;
    /// Samples [begin, end) of the global batch of `step`: what forward() takes, and the target of each of its logits.
    virtual std::pair<at::Tensor, at::Tensor> samples(const Text& text, std::uint64_t seed, int step,
                                                      std::size_t begin, std::size_t end) const = 0;
    virtual int targets() const = 0;             ///< of one sample
    virtual double flop_per_sample() const = 0;  ///< forward and backward, 2 a multiply-add
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
    int targets() const override { return 1; }
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

struct AttentionImpl : torch::nn::Module {
    AttentionImpl(int D, int H) : heads(H) {
        for (const auto& [name, projection] :
             {std::pair("q_proj", &q_proj), {"k_proj", &k_proj}, {"v_proj", &v_proj}, {"o_proj", &o_proj}})
            *projection = register_module(name, torch::nn::Linear(D, D));
    }
    at::Tensor forward(const at::Tensor& x_BSD) {
        const auto split = [&](torch::nn::Linear& projection) {
            return projection(x_BSD).unflatten(-1, {heads, -1}).transpose(1, 2);  // BHSK
        };
        const at::Tensor y_BHSK = at::scaled_dot_product_attention(split(q_proj), split(k_proj),
                                                                   split(v_proj), {}, 0, /*is_causal=*/true);
        return o_proj(y_BHSK.transpose(1, 2).flatten(2));
    }
    int heads;
    torch::nn::Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
};
TORCH_MODULE(Attention);

struct GeluMlpImpl : torch::nn::Module {
    explicit GeluMlpImpl(int D)
        : up_proj(register_module("up_proj", torch::nn::Linear(D, 4 * D))),
          down_proj(register_module("down_proj", torch::nn::Linear(4 * D, D))) {}
    at::Tensor forward(const at::Tensor& x_BSD) { return down_proj(at::gelu(up_proj(x_BSD), "tanh")); }
    torch::nn::Linear up_proj, down_proj;
};
TORCH_MODULE(GeluMlp);

/// x + attention(norm(x)), then x + mlp(norm(x)).
struct LayerImpl : torch::nn::Module {
    LayerImpl(int D, int H)
        : attention_norm(
              register_module("attention_norm", torch::nn::LayerNorm(std::vector<std::int64_t>{D}))),
          attention(register_module("attention", Attention(D, H))),
          mlp_norm(register_module("mlp_norm", torch::nn::LayerNorm(std::vector<std::int64_t>{D}))),
          mlp(register_module("mlp", GeluMlp(D))) {}
    at::Tensor forward(at::Tensor x_BSD) {
        x_BSD = x_BSD + attention(attention_norm(x_BSD));
        return x_BSD + mlp(mlp_norm(x_BSD));
    }
    torch::nn::LayerNorm attention_norm;
    Attention attention;
    torch::nn::LayerNorm mlp_norm;
    GeluMlp mlp;
};
TORCH_MODULE(Layer);

/// The head is the embedding.
class Gpt2 final : public Model {
  public:
    /// `sequence`: tokens of a sample.
    Gpt2(const Gpt2Shape& shape, int sequence, std::uint64_t seed, at::ScalarType dtype)
        : shape_(shape), sequence_(sequence) {
        const int D = shape.width;
        register_module("embed_tokens", embed_tokens_ = torch::nn::Embedding(vocabulary, D));
        register_module("embed_positions", embed_positions_ = torch::nn::Embedding(shape.longest, D));
        for (int l = 0; l < shape.layers; ++l) layers_->push_back(Layer(D, shape.heads));
        register_module("layers", layers_);
        register_module("norm", norm_ = torch::nn::LayerNorm(std::vector<std::int64_t>{D}));
        to(dtype);
        const at::NoGradGuard no_grad;
        for (auto& item : named_parameters())
            item.value().copy_(initial_value(item.key(), item.value().sizes(), shape.layers, seed));
    }
    at::Tensor forward(const at::Tensor& tokens_BS) override {
        at::Tensor x_BSD = embed_tokens_(tokens_BS) + embed_positions_(at::arange(tokens_BS.size(1)));
        for (const auto& layer : *layers_) x_BSD = layer->as<Layer>()->forward(x_BSD);
        return at::linear(norm_(x_BSD), embed_tokens_->weight);
    }
    std::pair<at::Tensor, at::Tensor> samples(const Text& text, std::uint64_t seed, int step,
                                              std::size_t begin, std::size_t end) const override {
        return lm_batch(text, seed, step, begin, end, sequence_);
    }
    int targets() const override { return sequence_; }
    double flop_per_sample() const override { return sequence_ * shape_.flop_per_token(sequence_); }

  private:
    Gpt2Shape shape_;
    int sequence_;
    torch::nn::Embedding embed_tokens_{nullptr}, embed_positions_{nullptr};
    torch::nn::ModuleList layers_;
    torch::nn::LayerNorm norm_{nullptr};
};

}  // namespace fived
