// Attention with this rank's heads over this rank's positions: column-parallel q, k and v, ring attention along sp,
// row-parallel o.
//
//     x_ND ──► q, k, v of my heads ──► ring attention ──► o: a term of the sum over tp
//              columns over tp         positions over sp   rows over tp
//
// B samples of a micro-batch  s this rank's positions, N = B s  h this rank's heads  K width of a head  a = h K
#pragma once

#include <map>
#include <string>

#include "hybrid_layers.hpp"
#include "hybrid_shape.hpp"
#include "sp_mpi.hpp"

namespace fived {

/// Ring attention for micro-batches of every size; all blocks share it, since it keeps nothing between calls.
template <class T>
class Rings {
  public:
    Rings(const ModelShape& shape, const Mesh& mesh, std::size_t sequence, Order order)
        : line_(mesh.along(Axis::sp)), order_(order) {
        shape_ = {1, shape.heads / std::size_t(mesh.size(Axis::tp)), 0, sequence, shape.head_width()};
        shape_.kv_heads = shape_.heads;
    }
    RingAttention<T>& of(std::size_t samples) {
        AttentionShape shape = shape_;
        shape.batch = samples;
        return rings_.try_emplace(samples, line_.size() > 1 ? &line_.comm() : nullptr, shape, order_, true)
            .first->second;
    }
    /// After a forward or backward.
    void book(const RingAttention<T>& ring) {
        line_.book(line_.size() * std::int64_t(ring.bytes_sent()), ring.blocked_seconds());
    }

  private:
    Line& line_;
    Order order_;
    AttentionShape shape_;
    std::map<std::size_t, RingAttention<T>> rings_;
};

template <class T>
class Attention {
  public:
    struct Kept {
        Work<T> qkv, out, logsumexp, attended, dqkv, dy;
    };

    Attention(Parameters<T>& parameters, const std::string& name, const ModelShape& shape, const Mesh& mesh)
        : heads_(shape.heads / mesh.size(Axis::tp)),
          K_(shape.head_width()),
          qkv_(project(parameters, name, shape.width, mine(mesh))),
          o_(parameters,
             parameters.add(name + ".o_proj.weight", {shape.width, shape.width}, {{Axis::tp, 1, mine(mesh)}}),
             parameters.add(name + ".o_proj.bias", {shape.width})) {}

    /// y_ND: this rank's term, without the bias.
    void forward(Rings<T>& rings, std::size_t samples, MatrixView<const T> x_ND, Kept& kept,
                 MatrixView<T> y_ND) {
        const std::size_t N = x_ND.rows;
        qkv_.forward(x_ND, split_.matrix(N, 3 * width()));
        add_bias<T>(split_.matrix(N, 3 * width()), qkv_.bias());
        to_heads(split_.matrix(N, 3 * width()), samples, kept.qkv.numbers(3 * N * width()));
        RingAttention<T>& ring = rings.of(samples);
        ring.forward(third(kept.qkv, N, 0), third(kept.qkv, N, 1), third(kept.qkv, N, 2),
                     kept.out.numbers(N * width()), kept.logsumexp.numbers(N * heads_));
        rings.book(ring);
        to_tokens(kept.out.numbers(N * width()), samples, kept.attended.matrix(N, width()));
        o_.forward(kept.attended.matrix(N, width()), y_ND);
    }
    /// dx_ND: this rank's term of the gradient of x.
    void backward_input(Rings<T>& rings, std::size_t samples, MatrixView<const T> dy_ND, Kept& kept,
                        MatrixView<T> dx_ND) {
        const std::size_t N = dy_ND.rows, n = N * width();
        add_rows<T>(dy_ND, o_.bias_gradient());
        copy_rows<T>(dy_ND, kept.dy.matrix(N, dy_ND.columns));
        const MatrixView<T> dattended = split_.matrix(N, width());
        o_.backward_input(dy_ND, dattended);
        to_heads(dattended, samples, dout_.numbers(n));
        RingAttention<T>& ring = rings.of(samples);
        ring.backward(dout_.numbers(n), third(kept.qkv, N, 0), third(kept.qkv, N, 1), third(kept.qkv, N, 2),
                      kept.out.numbers(n), kept.logsumexp.numbers(N * heads_), third(dqkv_, N, 0),
                      third(dqkv_, N, 1), third(dqkv_, N, 2));
        rings.book(ring);
        const MatrixView<T> dqkv = kept.dqkv.matrix(N, 3 * width());
        to_tokens(dqkv_.numbers(3 * n), samples, dqkv);
        add_rows<T>(dqkv, qkv_.bias_gradient());
        qkv_.backward_input(dqkv, dx_ND);
    }
    void backward_weights(MatrixView<const T> x_ND, Kept& kept) {
        const std::size_t N = x_ND.rows;
        o_.backward_weights(kept.dy.matrix(N, x_ND.columns), kept.attended.matrix(N, width()));
        qkv_.backward_weights(kept.dqkv.matrix(N, 3 * width()), x_ND);
    }
    std::span<const T> bias() const { return o_.bias(); }

  private:
    std::size_t width() const { return heads_ * K_; }
    Range mine(const Mesh& mesh) const { return {mesh.at(Axis::tp) * width(), width()}; }
    static Product<T> project(Parameters<T>& parameters, const std::string& name, std::size_t D,
                              const Range& mine) {
        const auto add = [&](const char* what, const Placed::Sizes& whole) {
            return parameters.add(name + what, whole, {{Axis::tp, 0, mine}});
        };
        // They lie one after the other: one product makes all three.
        const auto weight = add(".q_proj.weight", {D, D});
        add(".k_proj.weight", {D, D}), add(".v_proj.weight", {D, D});
        const auto bias = add(".q_proj.bias", {D});
        add(".k_proj.bias", {D}), add(".v_proj.bias", {D});
        return Product<T>(parameters, weight, bias, 3);
    }
    std::span<T> third(Work<T>& work, std::size_t N, std::size_t which) const {
        return work.numbers(3 * N * width()).subspan(which * N * width(), N * width());
    }
    /// [B s, c a] to c arrays [B, h, s, K].
    void to_heads(MatrixView<const T> x, std::size_t samples, std::span<T> heads) const {
        each_head(x.rows, x.columns, samples, [&](std::size_t n, std::size_t column, std::size_t place) {
            std::copy_n(&x(n, column), K_, heads.begin() + place);
        });
    }
    void to_tokens(std::span<const T> heads, std::size_t samples, MatrixView<T> x) const {
        each_head(x.rows, x.columns, samples, [&](std::size_t n, std::size_t column, std::size_t place) {
            std::copy_n(heads.begin() + place, K_, &x(n, column));
        });
    }
    template <class Use>
    void each_head(std::size_t N, std::size_t columns, std::size_t samples, Use use) const {
        const std::size_t s = N / samples;
        std::size_t place = 0;
        for (std::size_t first = 0; first < columns; first += width())
            for (std::size_t b = 0; b < samples; ++b)
                for (std::size_t h = 0; h < heads_; ++h)
                    for (std::size_t i = 0; i < s; ++i, place += K_) use(b * s + i, first + h * K_, place);
    }

    std::size_t heads_, K_;
    Product<T> qkv_, o_;
    Work<T> split_, dout_, dqkv_;
};

}  // namespace fived
