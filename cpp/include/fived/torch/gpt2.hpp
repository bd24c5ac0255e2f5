// GPT-2 in torch::nn, as common/models/transformer.py has it: the same names, the same initial weights for the same seed. It
// knows nothing of ranks. It may be a part of the model: consecutive layers.
//
// B batch  S sequence  D width  V vocabulary (the 256 values of a byte)  H heads  K width of a head
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fived/torch/torch.hpp"
#include "fived/torch/training.hpp"

namespace fived {

/// x w^T
using Product = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight)>;

/// y = x w^T + b, where a strategy may bring its own product.
struct LinearImpl : torch::nn::LinearImpl {
    using torch::nn::LinearImpl::LinearImpl;
    at::Tensor forward(const at::Tensor& x) {
        return product ? product(x, weight) + bias : at::linear(x, weight, bias);
    }
    Product product;
};
TORCH_MODULE(Linear);

inline torch::nn::LayerNorm layer_norm(int D) {
    return torch::nn::LayerNorm(std::vector<std::int64_t>{D});
}

struct AttentionImpl : torch::nn::Module {
    AttentionImpl(int D, int H) : heads(H) {
        for (const auto& [name, projection] :
             {std::pair("q_proj", &q_proj), {"k_proj", &k_proj}, {"v_proj", &v_proj}, {"o_proj", &o_proj}})
            *projection = register_module(name, Linear(D, D));
    }
    at::Tensor forward(const at::Tensor& x_BSD) {
        const auto split = [&](Linear& projection) {
            return projection(x_BSD).unflatten(-1, {heads, -1}).transpose(1, 2);  // BHSK
        };
        const at::Tensor y_BHSK = at::scaled_dot_product_attention(split(q_proj), split(k_proj),
                                                                   split(v_proj), {}, 0, /*is_causal=*/true);
        return o_proj(y_BHSK.transpose(1, 2).flatten(2));
    }
    int heads;
    Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
};
TORCH_MODULE(Attention);

/// What a layer has beside attention: x_BSD to [B, S, D].
struct FeedForward : torch::nn::Module {
    virtual at::Tensor forward(const at::Tensor& x_BSD) = 0;
};
using MakeFeedForward = std::function<std::shared_ptr<FeedForward>(int D)>;

struct GeluMlp : FeedForward {
    explicit GeluMlp(int D)
        : up_proj(register_module("up_proj", Linear(D, 4 * D))),
          down_proj(register_module("down_proj", Linear(4 * D, D))) {}
    at::Tensor forward(const at::Tensor& x_BSD) override {
        return down_proj(at::gelu(up_proj(x_BSD), "tanh"));
    }
    Linear up_proj, down_proj;
};
inline std::shared_ptr<FeedForward> gelu_mlp(int D) {
    return std::make_shared<GeluMlp>(D);
}

/// x + attention(norm(x)), then x + mlp(norm(x)).
struct LayerImpl : torch::nn::Module {
    LayerImpl(int D, int H, const MakeFeedForward& make_mlp)
        : attention_norm(register_module("attention_norm", layer_norm(D))),
          attention(register_module("attention", Attention(D, H))),
          mlp_norm(register_module("mlp_norm", layer_norm(D))),
          mlp(register_module("mlp", make_mlp(D))) {}
    at::Tensor forward(at::Tensor x_BSD) {
        x_BSD = x_BSD + attention(attention_norm(x_BSD));
        return x_BSD + mlp->forward(mlp_norm(x_BSD));
    }
    torch::nn::LayerNorm attention_norm;
    Attention attention;
    torch::nn::LayerNorm mlp_norm;
    std::shared_ptr<FeedForward> mlp;
};
TORCH_MODULE(Layer);

/// Layers [begin, end), the embeddings before the first layer, the head after the last, which is the embedding used twice.
/// tokens_BS or x_BSD goes in, x_BSD or logits_BSV comes out. Names are those in the whole model.
struct Gpt2PartImpl : torch::nn::Module {
    Gpt2PartImpl(const Gpt2Shape& shape, int begin, int end, const MakeFeedForward& make_mlp = gelu_mlp)
        : first(begin == 0), last(end == shape.layers), shape_(shape) {
        const int D = shape.width;
        if (first || last)
            embed_tokens = register_module("embed_tokens", torch::nn::Embedding(shape.vocabulary, D));
        if (first)
            embed_positions_ = register_module("embed_positions", torch::nn::Embedding(shape.longest, D));
        const auto numbered = register_module("layers", std::make_shared<torch::nn::Module>());
        for (int l = begin; l < end; ++l)
            layers_.push_back(numbered->register_module(std::to_string(l), Layer(D, shape.heads, make_mlp)));
        if (last) norm_ = register_module("norm", layer_norm(D));
    }
    explicit Gpt2PartImpl(const Gpt2Shape& shape, const MakeFeedForward& make_mlp = gelu_mlp)
        : Gpt2PartImpl(shape, 0, shape.layers, make_mlp) {}

    at::Tensor forward(at::Tensor x) {
        if (first) x = embed_tokens(x) + embed_positions_(at::arange(x.size(1), x.options()));
        for (Layer& layer : layers_) x = layer(x);
        if (!last) return x;
        return product_ ? product_(norm_(x), embed_tokens->weight)
                        : at::linear(norm_(x), embed_tokens->weight);
    }
    /// value(name, sizes) of each parameter.
    template <class Value>
    void fill(Value value) {
        const at::NoGradGuard no_grad;
        for (auto& item : named_parameters()) item.value().copy_(value(item.key(), item.value().sizes()));
    }
    void initialise(std::uint64_t seed) {
        fill([&](const std::string& name, at::IntArrayRef sizes) {
            return initial_value(name, sizes, shape_.layers, seed);
        });
    }
    /// Has the embedding of another part, on the same rank, for its own.
    void share(const Gpt2PartImpl& other) {
        embed_tokens = replace_module("embed_tokens", other.embed_tokens);
    }
    /// How all its matrices are multiplied from now on.
    void use(const Product& product) {
        product_ = product;
        for (const auto& module : modules())
            if (auto* linear = module->as<Linear>()) linear->product = product;
    }

    bool first, last;
    torch::nn::Embedding embed_tokens{nullptr};

  private:
    Gpt2Shape shape_;
    Product product_;
    torch::nn::Embedding embed_positions_{nullptr};
    std::vector<Layer> layers_;
    torch::nn::LayerNorm norm_{nullptr};
};
TORCH_MODULE(Gpt2Part);

}  // namespace fived
