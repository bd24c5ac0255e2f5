// What tp_libtorch trains: GPT-2 (Radford et al., 2019), as common/models/transformer.py has it: the same names, the
// same initial weights for the same seed. On one rank it is the plain model.
//
// B batch  S sequence  D width  V vocabulary (the 256 values of a byte)
#pragma once

#include <torch/all.h>

#include <cmath>
#include <string>
#include <vector>

#include "fived/random.hpp"
#include "tp_libtorch.hpp"

namespace fived {

constexpr int vocabulary = 256;

struct Gpt2 {
    int layers, width, heads;
    int longest;  // learned positions

    /// The whole model. Biases 0, norms 1, weights N(0, 0.02^2), those that add to the residual stream smaller.
    Parameters initial(std::uint64_t seed, at::ScalarType dtype) const {
        Parameters whole;
        for (const auto& [name, sizes] : shapes()) {
            at::Tensor values = at::zeros(sizes, at::kDouble);
            if (name.ends_with("norm.weight")) {
                values.fill_(1);
            } else if (name.ends_with("weight")) {
                const bool residual = name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
                const double std = residual ? 0.02 / std::sqrt(2 * layers) : 0.02;
                const std::uint64_t stream = stream_of(name);
                double* v = values.data_ptr<double>();
                for (std::int64_t k = 0; k < values.numel(); ++k)
                    v[k] = normal(seed, stream, std::uint64_t(k)) * std;
            }
            whole[name] = values.to(dtype).requires_grad_();
        }
        return whole;
    }

    /// tokens_BS to logits_BSv. The head is the embedding, used twice.
    at::Tensor forward(const at::Tensor& tokens_BS, const Parameters& mine, const RanksPtr& ranks) const {
        const at::Tensor& embed_vD = find(mine, "embed_tokens.weight");
        at::Tensor x_BSD = embedding(tokens_BS, embed_vD, vocabulary, ranks) +
                           find(mine, "embed_positions.weight").narrow(0, 0, tokens_BS.size(1));
        for (int l = 0; l < layers; ++l)
            x_BSD = layer(x_BSD, mine, "layers." + std::to_string(l) + ".", heads, ranks);
        return column_parallel(norm(x_BSD, mine, "norm."), {embed_vD}, {}, ranks)[0];
    }

    /// Operations of a token's forward and backward pass, 2 a multiply-add; attention as if its masked half counted.
    double flop_per_token(int sequence) const {
        const double L = layers, D = width;
        return 6 * (12 * L * D * D + vocabulary * D) + 12 * L * sequence * D;
    }

  private:
    std::map<std::string, std::vector<std::int64_t>> shapes() const {
        const std::int64_t D = width;
        std::map<std::string, std::vector<std::int64_t>> all{{"embed_tokens.weight", {vocabulary, D}},
                                                             {"embed_positions.weight", {longest, D}},
                                                             {"norm.weight", {D}},
                                                             {"norm.bias", {D}}};
        for (int l = 0; l < layers; ++l) {
            const std::string prefix = "layers." + std::to_string(l) + ".";
            const auto linear = [&](const std::string& name, std::int64_t out, std::int64_t in) {
                all[prefix + name + ".weight"] = {out, in};
                all[prefix + name + ".bias"] = {out};
            };
            for (const std::string name : {"q_proj", "k_proj", "v_proj", "o_proj"})
                linear("attention." + name, D, D);
            linear("mlp.up_proj", 4 * D, D);
            linear("mlp.down_proj", D, 4 * D);
            for (const std::string name : {"attention_norm", "mlp_norm"})
                all[prefix + name + ".weight"] = all[prefix + name + ".bias"] = {D};
        }
        return all;
    }
};

}  // namespace fived
