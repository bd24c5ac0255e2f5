// A Transformer layer, split over tp and sp, and its experts over ep: forward, and its backward pass in two halves.
//
//     a = x + attention(norm(x)),  y = a + mlp(norm(a)),  mlp: down(gelu(up)), or a mixture of experts
//
//     x ──► norm ──┬──► attention ──► all-reduce ──► + x ──► a      forward: a term from each rank along tp
//     a ──► norm ──┬──► mlp ────────► all-reduce ──► + a ──► y
//                  └── backward: each rank has a term of the gradient here ──► all-reduce
//
// Cost along tp: 2 all-reduces of N D numbers forward, 2 backward.
//
// N tokens of a micro-batch on this rank  D width
#pragma once

#include <string>
#include <variant>

#include "hybrid_attention.hpp"
#include "hybrid_mixture.hpp"

namespace fived {

/// What all blocks share, since nothing stays in it between calls.
template <class T>
struct Workspace {
    Rings<T> rings;
    ExpertRows<T> rows;
    Work<T> sum{}, dhidden{};
};

template <class T>
class Block {
  public:
    /// What is kept of a micro-batch until the backward of its weights.
    struct Kept {
        typename Norm<T>::Kept attention_norm, mlp_norm;
        typename Attention<T>::Kept attention;
        typename Mixture<T>::Kept mlp;  // an MLP uses a part of it
    };

    /// name: "layers.3".
    Block(Parameters<T>& parameters, const std::string& name, const ModelShape& shape, const Mesh& mesh,
          Workspace<T>& workspace)
        : tp_(mesh.along(Axis::tp)),
          workspace_(workspace),
          attention_norm_(parameters, name + ".attention_norm", shape.width, shape.epsilon),
          attention_(parameters, name + ".attention", shape, mesh),
          mlp_norm_(parameters, name + ".mlp_norm", shape.width, shape.epsilon),
          mlp_(mlp(parameters, name + ".mlp", shape, mesh, workspace)) {}

    /// x_ND becomes y_ND.
    void forward(std::size_t samples, MatrixView<T> x_ND, Kept& kept, const Between& between) {
        const MatrixView<T> z_ND = workspace_.sum.matrix(x_ND.rows, x_ND.columns);
        attention_.forward(workspace_.rings, samples, attention_norm_.forward(x_ND, kept.attention_norm),
                           kept.attention, z_ND);
        between();
        sum(z_ND);
        add_with_bias<T>(x_ND, z_ND, attention_.bias(), x_ND);

        const MatrixView<T> y_ND = mlp_norm_.forward(x_ND, kept.mlp_norm);
        std::visit(
            [&](auto& mlp) {
                mlp.forward(y_ND, kept.mlp, z_ND, between);
                sum(z_ND);
                add_with_bias<T>(x_ND, z_ND, mlp.bias(), x_ND);
            },
            mlp_);
    }

    /// The gradient of y_ND becomes that of x_ND.
    void backward_input(std::size_t samples, MatrixView<T> dy_ND, Kept& kept, const Between& between) {
        const MatrixView<T> dz_ND = workspace_.sum.matrix(dy_ND.rows, dy_ND.columns);
        std::visit([&](auto& mlp) { mlp.backward_input(dy_ND, kept.mlp, dz_ND, between); }, mlp_);
        sum(dz_ND);
        mlp_norm_.backward(dz_ND, kept.mlp_norm, dy_ND);  // dy is the gradient of a from here on

        attention_.backward_input(workspace_.rings, samples, dy_ND, kept.attention, dz_ND);
        between();
        sum(dz_ND);
        attention_norm_.backward(dz_ND, kept.attention_norm, dy_ND);
    }

    /// N: tokens of the micro-batch.
    void backward_weights(std::size_t N, std::size_t D, Kept& kept, const Between& between) {
        const MatrixView<T> y_ND = kept.mlp_norm.y.matrix(N, D);
        std::visit([&](auto& mlp) { mlp.backward_weights(y_ND, kept.mlp, between); }, mlp_);
        attention_.backward_weights(kept.attention_norm.y.matrix(N, D), kept.attention);
        between();
    }

  private:
    void sum(MatrixView<T> terms_ND) {
        tp_.all_reduce(std::span(terms_ND.data, terms_ND.rows * terms_ND.columns));
    }

    using MlpOrMixture = std::variant<FeedForward<T>, Mixture<T>>;
    static MlpOrMixture mlp(Parameters<T>& parameters, const std::string& name, const ModelShape& shape,
                            const Mesh& mesh, Workspace<T>& workspace) {
        if (!shape.experts) return whole_mlp(parameters, name, shape, mesh, workspace.dhidden);
        return Mixture<T>(parameters, name, shape, mesh, workspace.rows, workspace.dhidden);
    }

    Line& tp_;
    Workspace<T>& workspace_;
    Norm<T> attention_norm_;
    Attention<T> attention_;
    Norm<T> mlp_norm_;
    MlpOrMixture mlp_;
};

}  // namespace fived
