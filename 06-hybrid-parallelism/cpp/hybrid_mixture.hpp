// A mixture of experts in place of an MLP: whole experts over ep, of each a slice over tp.
//
//     y_n = sum over tp of  sum over the K chosen experts e of  w_ne expert_e(x_n)
//
//     x ──► router ──► rows by expert ──► all-to-all ──► experts ──► all-to-all ──► weighted sum: a term of the sum over tp
//           whole                         along ep       slices f    along ep
//
// All ranks along tp have the same tokens, so they make the same choices; along ep each exchanges rows with the ranks at its
// own place along tp. One of them adds the experts' last bias. Exchange and choice are chapter 05's; no token is dropped.
//
// N tokens of a micro-batch on this rank  E experts, e of this rank  K experts a token  R = N K rows  r rows of this
// rank's experts  D width
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ep_exchange.hpp"
#include "hybrid_mlp.hpp"
#include "hybrid_shape.hpp"

namespace fived {

/// Rows on their way; the mixtures of all layers share it, since no row stays between calls.
template <class T>
struct ExpertRows {
    Line& line;  // along ep
    std::vector<T> of_tokens{}, of_experts{}, gradients{};
    std::int64_t moved = 0;  // rows of a step to and from other ranks, each way

    const Communicator* comm() const { return line.size() > 1 ? &line.comm() : nullptr; }
    void book(Exchange& exchange) {
        line.book(line.size() * std::int64_t(exchange.bytes_sent()), exchange.seconds());
        exchange.forget();
    }
};

template <class T>
class Mixture {
  public:
    struct Kept : FeedForward<T>::Kept {
        Exchange exchange;
        std::vector<std::uint32_t> expert_NK, row_NK;
        std::vector<T> arrived_rD, returned_RD;
        Work<T> scores, weights;
        std::vector<typename FeedForward<T>::Kept> experts;
    };

    /// name: "layers.3.mlp".
    Mixture(Parameters<T>& parameters, const std::string& name, const ModelShape& shape, const Mesh& mesh,
            ExpertRows<T>& rows, Work<T>& dhidden)
        : parameters_(parameters),
          rows_(rows),
          E_(shape.experts),
          K_(shape.experts_per_token),
          kind_(shape.router),
          adds_bias_(mesh.at(Axis::tp) == 0),
          no_bias_D_(shape.width),
          first_E_(shape.experts + 1) {
        const std::size_t D = shape.width, F = shape.mlp_width(), tp = mesh.size(Axis::tp);
        const Range experts = experts_of(E_, mesh.size(Axis::ep), mesh.at(Axis::ep));
        const Range f = shard_of(F, tp, mesh.at(Axis::tp));
        const Cut mine{Axis::ep, 0, experts};
        const Axes terms = tp > 1 ? token_axes.with(Axis::tp) : token_axes;
        router_ = parameters.add(name + ".router.weight", {E_, D}, {}, terms);
        const std::string of = name + ".experts.";
        const auto up = parameters.add(of + "up_proj.weight", {E_, F, D}, {mine, {Axis::tp, 1, f}});
        const auto up_bias = parameters.add(of + "up_proj.bias", {E_, F}, {mine, {Axis::tp, 1, f}});
        const auto down = parameters.add(of + "down_proj.weight", {E_, D, F}, {mine, {Axis::tp, 2, f}});
        const auto down_bias = parameters.add(of + "down_proj.bias", {E_, D}, {mine}, terms);
        for (std::size_t i = 0; i < experts.length; ++i)
            experts_.emplace_back(Product<T>(parameters, up, up_bias, 1, i),
                                  Product<T>(parameters, down, down_bias, 1, i), dhidden, adds_bias_);
    }

    void forward(MatrixView<const T> x_ND, Kept& kept, MatrixView<T> y_ND, const Between& between) {
        const std::size_t R = x_ND.rows * K_, D = x_ND.columns;
        const MatrixView<T> scores_NE = kept.scores.matrix(x_ND.rows, E_);
        const std::span<T> weight_NK = kept.weights.numbers(R);
        kept.expert_NK.resize(R), kept.row_NK.resize(R), kept.experts.resize(experts_.size());
        gemm<T>(x_ND, t(parameters_.matrix(router_)), scores_NE);
        route<T>(scores_NE, K_, kind_, kept.expert_NK, weight_NK);
        sort_by_expert(kept.expert_NK, kept.row_NK, first_E_);
        rows_.of_tokens.resize(R * D);
        permute<T>(x_ND, kept.row_NK, {rows_.of_tokens.data(), R, D});
        between();

        kept.exchange.plan(rows_.comm(), first_E_, D);
        kept.exchange.to_experts(rows_.of_tokens, kept.arrived_rD);
        rows_.of_experts.resize(kept.arrived_rD.size());
        for (std::size_t i = 0; i < experts_.size(); ++i) {
            const MatrixView<T> y = of(kept.exchange, rows_.of_experts, i, D);
            experts_[i].forward(of(kept.exchange, kept.arrived_rD, i, D), kept.experts[i], y, between);
            if (adds_bias_) add_bias<T>(y, experts_[i].bias());
        }
        kept.exchange.to_tokens(rows_.of_experts, kept.returned_RD);
        rows_.moved += std::int64_t(kept.exchange.rows_moved());
        rows_.book(kept.exchange);
        combine<T>({kept.returned_RD.data(), R, D}, kept.row_NK, weight_NK, y_ND);
    }
    /// dx_ND: this rank's term of the gradient of x.
    void backward_input(MatrixView<const T> dy_ND, Kept& kept, MatrixView<T> dx_ND, const Between& between) {
        const std::size_t R = dy_ND.rows * K_, D = dy_ND.columns;
        const MatrixView<T> dscores_NE = kept.scores.matrix(dy_ND.rows, E_);
        const std::span<T> weight_NK = kept.weights.numbers(R), dweight_NK = dweights_.numbers(R);
        combine_backward<T>(dy_ND, kept.row_NK, weight_NK, dweight_NK, {kept.returned_RD.data(), R, D});
        between();

        kept.exchange.to_experts(kept.returned_RD, rows_.of_experts);
        rows_.gradients.resize(rows_.of_experts.size());
        for (std::size_t i = 0; i < experts_.size(); ++i) {
            const MatrixView<T> dy = of(kept.exchange, rows_.of_experts, i, D);
            experts_[i].backward_input(dy, kept.experts[i], of(kept.exchange, rows_.gradients, i, D),
                                       between);
        }
        kept.exchange.to_tokens(rows_.gradients, rows_.of_tokens);
        rows_.book(kept.exchange);
        permute_backward<T>({rows_.of_tokens.data(), R, D}, kept.row_NK, dx_ND);
        route_backward<T>(kept.expert_NK, weight_NK, dweight_NK, dscores_NE);
        gemm<T>(dscores_NE, parameters_.matrix(router_), dx_ND, 1);
    }
    void backward_weights(MatrixView<const T> x_ND, Kept& kept, const Between& between) {
        gemm<T>(t(kept.scores.matrix(x_ND.rows, E_)), x_ND, parameters_.matrix_gradient(router_), 1);
        for (std::size_t i = 0; i < experts_.size(); ++i)
            experts_[i].backward_weights(of(kept.exchange, kept.arrived_rD, i, x_ND.columns), kept.experts[i],
                                         between);
    }
    /// Zeros: the experts' biases are in the sum.
    std::span<const T> bias() const { return no_bias_D_; }

  private:
    static MatrixView<T> of(const Exchange& exchange, std::vector<T>& rows_rD, std::size_t expert,
                            std::size_t D) {
        const Range& rows = exchange.rows(expert);
        return {rows_rD.data() + rows.begin * D, rows.length, D};
    }

    Parameters<T>& parameters_;
    ExpertRows<T>& rows_;
    std::size_t E_, K_;
    Weights kind_;
    bool adds_bias_;
    typename Parameters<T>::Id router_ = 0;
    std::vector<FeedForward<T>> experts_;
    std::vector<T> no_bias_D_;
    std::vector<std::size_t> first_E_;
    Work<T> dweights_;
};

}  // namespace fived
