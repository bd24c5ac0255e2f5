// The MLP cut into stages, and what is done to a micro-batch in one of them.
//
//     forward             z = a W' + b     GELU(z) goes on                      keeps the inputs a and GELU'(z)
//     backward, input     dz = da GELU'(z)     da of the layer below = dz W     what the stage before waits for
//     backward, weights   dW += dz' a                                           what nobody waits for in the step
//
// The biases' gradients are sums of dz, which come with it.
//
// B = rows of the micro-batch, I and O = inputs and outputs of a layer
#pragma once

#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "fived/math/mlp.hpp"
#include "fived/math/partition.hpp"
#include "pp_buffers.hpp"

namespace fived {

/// What a stage keeps of a micro-batch from its forward to the end of its backward.
template <class T>
struct Kept {
    MatrixView<const T> x_BI;  // the stage's input: rows of the batch, or `input`
    typename Buffers<T>::Buffer input;
    std::vector<typename Buffers<T>::Buffer> a,
        z;  // of each layer its output, except the last's; GELU'(z), then dz
};

/// The first layer of a stage; of stage `stages`, the end.
constexpr std::size_t first_layer(std::size_t layers, std::size_t stages, std::size_t stage) {
    return shard_of(layers, stages, stage).begin;
}

/// The stages of one rank.
template <class T>
class MlpStages : public MlpLayers<T> {
  public:
    using Buffer = typename Buffers<T>::Buffer;
    using Between = std::function<void()>;  // called between matrix products

    /// mine: of all stages, whether this rank has it. `buffers` must outlive this.
    MlpStages(const std::vector<int>& sizes, std::uint64_t seed, const std::vector<bool>& mine,
              Buffers<T>& buffers)
        : MlpLayers<T>(sizes, seed,
                       [&](std::size_t l) {
                           const std::size_t L = sizes.size() - 1, n = mine.size();
                           std::size_t s = 0;
                           while (l >= first_layer(L, n, s + 1)) ++s;
                           return bool(mine[s]);
                       }),
          stages_(mine.size()),
          buffers_(buffers) {}

    using MlpLayers<T>::check_samples, MlpLayers<T>::clear_bias_gradients, MlpLayers<T>::widest;
    /// Width of a stage's input.
    std::size_t width(std::size_t stage) const { return inputs(first(stage)); }

    /// Takes kept.x_BI. Returns the stage's output; of the last stage, whose logits stay in `kept`, nothing.
    Buffer forward(std::size_t stage, Kept<T>& kept, const Between& between) {
        const std::size_t B = kept.x_BI.rows;
        for (std::size_t l = first(stage); l < end(stage); ++l) {
            kept.z.push_back(buffers_.take());
            const MatrixView<T> z_BO(kept.z.back().get(), B, outputs(l));
            gemm<T>(input(stage, kept, l), t(weight(l)), z_BO);
            between();
            if (l + 1 == layers()) return {};
            kept.a.push_back(buffers_.take());
            bias_gelu<T>(z_BO, bias(l), {kept.a.back().get(), B, outputs(l)});
        }
        Buffer output = std::move(kept.a.back());
        kept.a.pop_back();
        return output;
    }
    /// Of the last stage, after its forward: scale times the sum of the cross-entropies. Begins the backward pass.
    double loss(Kept<T>& kept, std::span<const std::uint8_t> y_B, double scale) {
        const std::size_t last = layers() - 1;
        return softmax_cross_entropy<T>({kept.z.back().get(), y_B.size(), outputs(last)}, bias(last), y_B,
                                        T(scale), bias_gradient(last));
    }
    /// da: gradient of the stage's output; nothing in the last stage. Returns that of its input; nothing in the first.
    Buffer backward_input(std::size_t stage, Kept<T>& kept, Buffer da, const Between& between) {
        const std::size_t B = kept.x_BI.rows;
        for (std::size_t l = end(stage); l-- > first(stage);) {
            const MatrixView<T> dz_BO = dz(stage, kept, l);
            if (l + 1 < layers()) gelu_backward<T>({da.get(), B, outputs(l)}, dz_BO, bias_gradient(l));
            if (l == 0) break;
            if (!da) da = buffers_.take();
            gemm<T>(dz_BO, weight(l), MatrixView<T>(da.get(), B, inputs(l)));
            between();
        }
        if (stage > 0) return da;
        buffers_.give(std::move(da));
        return {};
    }
    /// Adds to the gradients if `accumulate`, else writes them. Gives back what was kept.
    void backward_weights(std::size_t stage, Kept<T> kept, bool accumulate, const Between& between) {
        for (std::size_t l = end(stage); l-- > first(stage);) {
            gemm<T>(t(dz(stage, kept, l)), input(stage, kept, l), this->weight_gradient(l),
                    accumulate ? 1 : 0);
            between();
        }
        buffers_.give(std::move(kept.input));
        for (auto* list : {&kept.a, &kept.z})
            for (Buffer& buffer : *list) buffers_.give(std::move(buffer));
    }

  private:
    using MlpLayers<T>::layers, MlpLayers<T>::inputs, MlpLayers<T>::outputs, MlpLayers<T>::weight,
        MlpLayers<T>::bias, MlpLayers<T>::bias_gradient;

    std::size_t first(std::size_t stage) const { return first_layer(layers(), stages_, stage); }
    std::size_t end(std::size_t stage) const { return first(stage + 1); }
    MatrixView<const T> input(std::size_t stage, const Kept<T>& kept, std::size_t l) const {
        if (l == first(stage)) return kept.x_BI;
        return {kept.a[l - first(stage) - 1].get(), kept.x_BI.rows, inputs(l)};
    }
    MatrixView<T> dz(std::size_t stage, const Kept<T>& kept, std::size_t l) const {
        return {kept.z[l - first(stage)].get(), kept.x_BI.rows, outputs(l)};
    }

    std::size_t stages_;
    Buffers<T>& buffers_;
};

}  // namespace fived
