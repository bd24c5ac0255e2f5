// An MLP, split over tp: the whole of a layer's, or one expert.
//
//     x ──► up: rows f over tp ──► gelu ──► down: columns f over tp ──► a term of the sum over tp
//
// N tokens  D width  f this rank's columns of the hidden layer
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "hybrid_layers.hpp"
#include "hybrid_shape.hpp"

namespace fived {

using Between = std::function<void()>;  // called between matrix products

template <class T>
class FeedForward {
  public:
    /// What is kept of a micro-batch until the backward of its weights.
    struct Kept {
        Work<T> up, hidden, dy;
    };

    /// dhidden: shared, since nothing stays in it between calls. learns_bias: whether this rank has the gradient of bias().
    FeedForward(Product<T> up, Product<T> down, Work<T>& dhidden, bool learns_bias = true)
        : up_(std::move(up)), down_(std::move(down)), dhidden_(dhidden), learns_bias_(learns_bias) {}

    /// The caller adds bias(), once in the sum over tp.
    void forward(MatrixView<const T> x_ND, Kept& kept, MatrixView<T> y_ND, const Between& between) {
        const MatrixView<T> up = kept.up.matrix(x_ND.rows, f()), hidden = kept.hidden.matrix(x_ND.rows, f());
        up_.forward(x_ND, up);
        between();
        bias_gelu<T>(up, up_.bias(), hidden);  // up becomes GELU'(up)
        down_.forward(hidden, y_ND);
        between();
    }
    /// dx_ND: this rank's term of the gradient of x.
    void backward_input(MatrixView<const T> dy_ND, Kept& kept, MatrixView<T> dx_ND, const Between& between) {
        const std::size_t N = dy_ND.rows;
        const MatrixView<T> dup = kept.up.matrix(N, f()), dhidden = dhidden_.matrix(N, f());
        if (learns_bias_) add_rows<T>(dy_ND, down_.bias_gradient());
        copy_rows<T>(dy_ND, kept.dy.matrix(N, dy_ND.columns));
        down_.backward_input(dy_ND, dhidden);
        between();
        gelu_backward<T>(dhidden, dup, up_.bias_gradient());  // dup was GELU'(up)
        up_.backward_input(dup, dx_ND);
        between();
    }
    void backward_weights(MatrixView<const T> x_ND, Kept& kept, const Between& between) {
        const std::size_t N = x_ND.rows;
        down_.backward_weights(kept.dy.matrix(N, x_ND.columns), kept.hidden.matrix(N, f()));
        between();
        up_.backward_weights(kept.up.matrix(N, f()), x_ND);
        between();
    }
    std::span<const T> bias() const { return down_.bias(); }

  private:
    std::size_t f() const { return up_.outputs(); }

    Product<T> up_, down_;
    Work<T>& dhidden_;
    bool learns_bias_;
};

/// The MLP of a layer. name: "layers.3.mlp".
template <class T>
FeedForward<T> whole_mlp(Parameters<T>& parameters, const std::string& name, const ModelShape& shape,
                         const Mesh& mesh, Work<T>& dhidden) {
    const std::size_t D = shape.width, F = shape.mlp_width();
    const Cut rows{Axis::tp, 0, shard_of(F, mesh.size(Axis::tp), mesh.at(Axis::tp))},
        columns{Axis::tp, 1, rows.part};
    const auto up = parameters.add(name + ".up_proj.weight", {F, D}, {rows});
    const auto up_bias = parameters.add(name + ".up_proj.bias", {F}, {rows});
    const auto down = parameters.add(name + ".down_proj.weight", {D, F}, {columns});
    return {{parameters, up, up_bias},
            {parameters, down, parameters.add(name + ".down_proj.bias", {D})},
            dhidden};
}

}  // namespace fived
