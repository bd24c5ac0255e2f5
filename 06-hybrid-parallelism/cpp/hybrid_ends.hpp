// The ends of the model: embeddings, and norm, head and loss. The embedding's rows, the vocabulary, are split over tp, and
// the head is the embedding used again.
//
//     embed   x = E[token] + P[position]      a rank has the row of some tokens, else zeros ──► all-reduce along tp
//     head    z_Nv = norm(x) E'               logits of this rank's part of the vocabulary; they never move
//     loss    log sum e^z - z[target]         3 numbers a token along tp: the maximum, the sum, the target's logit
//
// N tokens of a micro-batch on this rank  D width  V vocabulary, v this rank's part of it
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "fived/lesson/text.hpp"
#include "hybrid_layers.hpp"
#include "hybrid_shape.hpp"

namespace fived {

template <class T>
class Embedding {
  public:
    /// here: the parameters of the first stage; tokens alone are what the head needs.
    Embedding(Parameters<T>& parameters, const ModelShape& shape, const Mesh& mesh, bool first)
        : parameters_(parameters),
          tp_(mesh.along(Axis::tp)),
          v_(shard_of(shape.vocabulary, tp_.size(), tp_.rank())),
          tokens_(
              parameters.add("embed_tokens.weight", {shape.vocabulary, shape.width}, {{Axis::tp, 0, v_}})),
          positions_(first ? parameters.add("embed_positions.weight", {shape.longest, shape.width}) : 0) {}

    typename Parameters<T>::Id id() const { return tokens_; }
    const Range& part() const { return v_; }
    MatrixView<T> matrix() const { return parameters_.matrix(tokens_); }
    MatrixView<T> gradient() const { return parameters_.matrix_gradient(tokens_); }

    void forward(const MicroBatch& batch, MatrixView<T> x_ND) const {
        for (std::size_t n = 0; n < x_ND.rows; ++n) {
            if (has(batch.tokens[n]))
                std::ranges::copy(matrix().row(batch.tokens[n] - v_.begin), x_ND.row(n).begin());
            else
                std::ranges::fill(x_ND.row(n), T(0));
        }
        tp_.all_reduce(std::span(x_ND.data, x_ND.rows * x_ND.columns));
        const MatrixView<T> positions = parameters_.matrix(positions_);
        for (std::size_t n = 0; n < x_ND.rows; ++n) add(positions.row(batch.positions[n]), x_ND.row(n));
    }
    void backward(const MicroBatch& batch, MatrixView<T> dx_ND) const {
        const MatrixView<T> dtokens = gradient(), dpositions = parameters_.matrix_gradient(positions_);
        for (std::size_t n = 0; n < dx_ND.rows; ++n) {
            if (has(batch.tokens[n])) add(dx_ND.row(n), dtokens.row(batch.tokens[n] - v_.begin));
            add(dx_ND.row(n), dpositions.row(batch.positions[n]));
        }
    }
    bool has(std::int64_t token) const {
        return token >= std::int64_t(v_.begin) && token < std::int64_t(v_.end());
    }

  private:
    static void add(std::span<const T> term, std::span<T> sum) {
        for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += term[d];
    }

    Parameters<T>& parameters_;
    Line& tp_;
    Range v_;
    typename Parameters<T>::Id tokens_, positions_;
};

template <class T>
class Head {
  public:
    struct Kept {
        typename Norm<T>::Kept norm;
        Work<T> dz;
    };

    Head(Parameters<T>& parameters, const ModelShape& shape, const Mesh& mesh, Embedding<T>& embedding)
        : tp_(mesh.along(Axis::tp)),
          embedding_(embedding),
          norm_(parameters, "norm", shape.width, shape.epsilon) {}

    /// The sum of the targets' cross-entropies; their gradient, times `scale`, is kept.
    double forward(const MicroBatch& batch, MatrixView<const T> x_ND, T scale, Kept& kept) {
        const MatrixView<T> z_Nv = kept.dz.matrix(x_ND.rows, embedding_.part().length);
        gemm<T>(norm_.forward(x_ND, kept.norm), t(embedding_.matrix()), z_Nv);
        return cross_entropy(batch, z_Nv, scale);
    }
    void backward_input(Kept& kept, MatrixView<T> dx_ND) {
        const MatrixView<T> dy_ND = sum_.matrix(dx_ND.rows, dx_ND.columns);
        gemm<T>(kept.dz.matrix(dx_ND.rows, embedding_.part().length), embedding_.matrix(), dy_ND);
        tp_.all_reduce(std::span(dy_ND.data, dy_ND.rows * dy_ND.columns));
        std::ranges::fill(std::span(dx_ND.data, dx_ND.rows * dx_ND.columns), T(0));
        norm_.backward(dy_ND, kept.norm, dx_ND);
    }
    void backward_weights(std::size_t N, std::size_t D, Kept& kept) {
        gemm<T>(t(kept.dz.matrix(N, embedding_.part().length)), kept.norm.y.matrix(N, D),
                embedding_.gradient(), 1);
    }

  private:
    /// z becomes its gradient. Of a target that does not count, both are 0.
    double cross_entropy(const MicroBatch& batch, MatrixView<T> z_Nv, T scale) {
        const std::size_t N = z_Nv.rows, first = embedding_.part().begin;
        const std::span<T> largest = largest_.numbers(N), sums = sums_.numbers(2 * N);
        for (std::size_t n = 0; n < N; ++n) largest[n] = *std::ranges::max_element(z_Nv.row(n));
        tp_.all_reduce(largest, MPI_MAX);
        for (std::size_t n = 0; n < N; ++n) {
            const std::int64_t target = batch.targets[n];
            T* __restrict z = z_Nv.row(n).data();
            T sum = 0;
            sums[2 * n + 1] = embedding_.has(target) ? z[target - first] - largest[n] : T(0);
#pragma omp simd reduction(+ : sum)
            for (std::size_t c = 0; c < z_Nv.columns; ++c) {
                z[c] = exponential(z[c] - largest[n]);
                sum += z[c];
            }
            sums[2 * n] = sum;
        }
        tp_.all_reduce(sums);
        double loss = 0;
        for (std::size_t n = 0; n < N; ++n) {
            const bool counts = batch.targets[n] != padding;
            if (counts) loss += double(std::log(sums[2 * n]) - sums[2 * n + 1]);
            const T factor = counts ? scale / sums[2 * n] : T(0);
            for (T& z : z_Nv.row(n)) z *= factor;
            if (embedding_.has(batch.targets[n])) z_Nv(n, batch.targets[n] - first) -= scale;
        }
        return loss;
    }

    Line& tp_;
    Embedding<T>& embedding_;
    Norm<T> norm_;
    Work<T> sum_, largest_, sums_;
};

}  // namespace fived
