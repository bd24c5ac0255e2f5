// What tp_libtorch trains: GPT-2, with the names of common/models/transformer.py. On one rank it is the plain model.
//
// B batch  S sequence  D width  V vocabulary (the 256 values of a byte)
#pragma once

#include <string>
#include <vector>

#include "fived/torch/training.hpp"
#include "tp_libtorch.hpp"

namespace fived {

struct Gpt2 : Gpt2Shape {
    /// The whole model.
    Parameters initial(std::uint64_t seed, at::ScalarType dtype) const {
        Parameters whole;
        for (const auto& [name, sizes] : shapes())
            whole[name] = initial_value(name, sizes, layers, seed).to(dtype).requires_grad_();
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
