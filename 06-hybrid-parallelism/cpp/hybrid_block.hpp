// A Transformer layer, split over tp and sp: forward, and its backward pass in two halves.
//
//     a = x + attention(norm(x)),  y = a + down(gelu(up(norm(a))))
//
//     x ──► norm ──┬──► attention ──► all-reduce ──► + x ──► a      forward: a term from each rank along tp
//     a ──► norm ──┬──► up, gelu, down ─► all-reduce ─► + a ──► y
//                  └── backward: each rank has a term of the gradient here ──► all-reduce
//
// Cost along tp: 2 all-reduces of N D numbers forward, 2 backward.
//
// N tokens of a micro-batch on this rank  D width  f this rank's columns of the MLP
#pragma once

#include <functional>
#include <string>

#include "hybrid_attention.hpp"

namespace fived {

template <class T>
class Block {
  public:
    using Between = std::function<void()>;  // called between matrix products
    /// What is kept of a micro-batch until the backward of its weights.
    struct Kept {
        typename Norm<T>::Kept attention_norm, mlp_norm;
        typename Attention<T>::Kept attention;
        Work<T> up, gelu, dy;
    };

    /// name: "layers.3".
    Block(Parameters<T>& parameters, const std::string& name, const ModelShape& shape, const Mesh& mesh,
          Rings<T>& rings)
        : tp_(mesh.along(Axis::tp)),
          rings_(rings),
          f_(range(shape.mlp_width(), tp_.size(), tp_.rank())),
          attention_norm_(parameters, name + ".attention_norm", shape.width, shape.epsilon),
          attention_(parameters, name + ".attention", shape, mesh),
          mlp_norm_(parameters, name + ".mlp_norm", shape.width, shape.epsilon),
          up_(parameters, parameters.rows(name + ".mlp.up_proj.weight", f_, shape.mlp_width(), shape.width),
              parameters.rows(name + ".mlp.up_proj.bias", f_, shape.mlp_width())),
          down_(parameters,
                parameters.columns(name + ".mlp.down_proj.weight", shape.width, f_, shape.mlp_width()),
                parameters.whole(name + ".mlp.down_proj.bias", shape.width)) {}

    /// x_ND becomes y_ND.
    void forward(std::size_t samples, MatrixView<T> x_ND, Kept& kept, const Between& between) {
        const std::size_t N = x_ND.rows, D = x_ND.columns;
        const MatrixView<T> z_ND = sum_.matrix(N, D);
        attention_.forward(rings_, samples, attention_norm_.forward(x_ND, kept.attention_norm),
                           kept.attention, z_ND);
        between();
        sum(z_ND);
        add_with_bias<T>(x_ND, z_ND, attention_.bias(), x_ND);

        const MatrixView<T> up = kept.up.matrix(N, f_.length), gelu = kept.gelu.matrix(N, f_.length);
        up_.forward(mlp_norm_.forward(x_ND, kept.mlp_norm), up);
        between();
        bias_gelu<T>(up, up_.bias(), gelu);  // up becomes GELU'(up)
        down_.forward(gelu, z_ND);
        between();
        sum(z_ND);
        add_with_bias<T>(x_ND, z_ND, down_.bias(), x_ND);
    }

    /// The gradient of y_ND becomes that of x_ND.
    void backward_input(std::size_t samples, MatrixView<T> dy_ND, Kept& kept, const Between& between) {
        const std::size_t N = dy_ND.rows, D = dy_ND.columns;
        const MatrixView<T> dz_ND = sum_.matrix(N, D), dup = kept.up.matrix(N, f_.length),
                            dgelu = dgelu_.matrix(N, f_.length);
        add_rows<T>(dy_ND, down_.bias_gradient());
        copy_rows<T>(dy_ND, kept.dy.matrix(N, D));
        down_.backward_input(dy_ND, dgelu);
        between();
        gelu_backward<T>(dgelu, dup, up_.bias_gradient());  // dup was GELU'(up)
        up_.backward_input(dup, dz_ND);
        between();
        sum(dz_ND);
        mlp_norm_.backward(dz_ND, kept.mlp_norm, dy_ND);  // dy is the gradient of a from here on

        attention_.backward_input(rings_, samples, dy_ND, kept.attention, dz_ND);
        between();
        sum(dz_ND);
        attention_norm_.backward(dz_ND, kept.attention_norm, dy_ND);
    }

    /// N: tokens of the micro-batch.
    void backward_weights(std::size_t N, std::size_t D, Kept& kept, const Between& between) {
        down_.backward_weights(kept.dy.matrix(N, D), kept.gelu.matrix(N, f_.length));
        between();
        up_.backward_weights(kept.up.matrix(N, f_.length), kept.mlp_norm.y.matrix(N, D));
        between();
        attention_.backward_weights(kept.attention_norm.y.matrix(N, D), kept.attention);
        between();
    }

  private:
    void sum(MatrixView<T> terms_ND) {
        tp_.all_reduce(std::span(terms_ND.data, terms_ND.rows * terms_ND.columns));
    }

    Line& tp_;
    Rings<T>& rings_;
    Range f_;
    Norm<T> attention_norm_;
    Attention<T> attention_;
    Norm<T> mlp_norm_;
    Product<T> up_, down_;
    Work<T> sum_, dgelu_;
};

}  // namespace fived
