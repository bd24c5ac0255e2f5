// A mixture of experts whose experts are spread over ranks; each token travels to its experts and back.
//
//     y_t = sum over the K chosen experts e of  w_te expert_e(x_t),   w = softmax of the router's logits
//
//     tokens ──► router ──► rows by expert ──► all-to-all ──► experts ──► all-to-all ──► weighted and summed ──► y
//                                              ep_exchange.hpp has the picture of both
//
// Every rank holds the whole router and its own experts. The router meets this rank's tokens alone, so its gradient is
// summed over the ranks; an expert meets the tokens of all, so its gradient is complete where it is. No token is dropped.
//
// Which experts a token chooses, and their weights, is route() of ep_kernels.hpp; which expert is where, experts_of().
//
// Cost: a rank that sends s rows to others and gets r from them sends 2 (s + r) D numbers, forward and backward, 8
// bytes for each expert that is not its own, and the sum of the router's gradient. Experts, their gradients and states
// 1/P. GShard (arXiv:2006.16668, section 3); dropless: MegaBlocks (arXiv:2211.15841).
//
// T this rank's tokens  E experts, e of this rank  K experts a token  R = T K  r rows of this rank's experts  D width
// F width of an expert  P ranks
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ep_exchange.hpp"
#include "ep_kernels.hpp"
#include "fived/lesson/record.hpp"
#include "fived/math/mlp.hpp"
#include "fived/math/optimizer.hpp"
#include "fived/mpi/collectives.hpp"
#include "fived/mpi/mpi.hpp"
#include "fived/named.hpp"

namespace fived {

/// An expert: SwiGLU without biases, as Mixtral; or GELU with biases, as Switch.
enum class Activation { swiglu, gelu };
constexpr auto names(Activation) {
    return std::array{"swiglu", "gelu"};
}

/// Top-1 (Switch) is experts_per_token = 1 with Weights::softmax. Renormalised over one expert, each weight is 1, and the
/// router gets no gradient.
struct MoEShape {
    std::size_t width = 1, mlp_width = 1, experts = 1, experts_per_token = 1;
    Activation activation = Activation::swiglu;
    Weights router = Weights::renormalised;

    bool gated() const { return activation == Activation::swiglu; }
    std::size_t expert_parameters() const {
        return gated() ? 3 * width * mlp_width : 2 * width * mlp_width + width + mlp_width;
    }
    std::size_t parameters() const { return experts * (width + expert_parameters()); }
};

/// A parameter of the layer, or of its experts with those stacked on dimension 0; here is this rank's part.
struct StackedParameter : Parameter {
    std::vector<std::size_t> sizes;
    std::size_t whole_length, first_place;  // of dimension 0 of the whole; there this part begins

    const std::vector<std::size_t>& shape() const { return sizes; }
    std::vector<std::size_t> whole_shape() const {
        std::vector<std::size_t> whole = sizes;
        whole[0] = whole_length;
        return whole;
    }
    /// Of element i of this part, the place in the whole parameter.
    std::size_t place(std::size_t i) const { return first_place + i; }
};

/// A mixture of experts on all ranks of `comm`; serial when comm is null. The weights are those of layers.0.mlp of a
/// common/models/transformer.py of one layer: each rank makes its part alone.
template <class T>
class ExpertParallelLayer {
  public:
    /// `comm` must outlive this. Throws std::invalid_argument where a rank would have no expert, or a token cannot choose
    /// as many as it should.
    ExpertParallelLayer(const MoEShape& shape, std::uint64_t seed, const Communicator* comm);

    /// y_TD from this rank's x_TD; ranks may have different numbers of tokens, or none. Collective.
    void forward(MatrixView<const T> x_TD, MatrixView<T> y_TD);
    /// dx_TD from dy_TD, once after the forward of the same x, which must still be there; gradients() are set. Collective.
    void backward(MatrixView<const T> dy_TD, MatrixView<T> dx_TD);
    /// 2-norm of the whole layer's gradients: the router counts once, an expert where it is. Collective.
    double gradient_norm() const;
    template <class Optimizer>
    void step(Optimizer& optimizer) {
        optimizer.step(std::span<T>(weights_), std::span<const T>(gradients_));
    }

    const MoEShape& shape() const { return shape_; }
    Range experts() const { return mine_; }
    std::span<const StackedParameter> parameters() const { return parameters_; }
    std::span<T> weights() { return weights_; }
    std::span<T> gradients() { return gradients_; }
    /// The experts of each of the tokens of the last forward, the one with the largest weight first.
    std::span<const std::uint32_t> choices() const { return expert_TK_; }
    /// Rows that this rank's experts computed in the last forward.
    std::size_t load() const { return exchange_.arrived(); }
    /// Bytes this rank sent, its seconds in MPI, and in permuting and combining, since the last forward began.
    std::size_t bytes_sent() const { return exchange_.bytes_sent() + router_bytes_; }
    double communication_seconds() const { return exchange_.seconds() + router_seconds_; }
    double permutation_seconds() const { return permutation_seconds_; }
    /// Bytes of a forward and backward that sends `sent` rows to other ranks' experts and gets `received` for its own.
    std::size_t bytes_by_formula(std::size_t sent, std::size_t received) const;
    /// Choose experts in turn, not by the router: equal load, to measure with. `first_token`: the number, among
    /// those of all ranks, of this rank's first.
    bool balanced = false;
    std::size_t first_token = 0;

  private:
    void add_parameter(const std::string& name, std::vector<std::size_t> shape);
    void initialise(std::uint64_t seed);
    void compute(std::size_t expert);
    void compute_backward(std::size_t expert);
    int ranks() const { return comm_ ? comm_->size() : 1; }
    MatrixView<T> tokens(std::vector<T>& work, std::size_t columns) { return {work.data(), T_, columns}; }
    MatrixView<T> rows(std::vector<T>& work) { return {work.data(), R_, shape_.width}; }
    MatrixView<T> rows_of(std::vector<T>& work, std::size_t expert, std::size_t columns) {
        const Range& at = exchange_.rows(expert);
        return {work.data() + at.begin * columns, at.length, columns};
    }
    MatrixView<T> matrix(std::vector<T>& flat, const std::string& name, std::size_t expert);
    std::span<T> vector(std::vector<T>& flat, const std::string& name, std::size_t expert);
    MatrixView<T> router(std::vector<T>& flat) { return {flat.data(), shape_.experts, shape_.width}; }

    MoEShape shape_;
    const Communicator* comm_;
    Range mine_;  // this rank's experts
    std::vector<StackedParameter> parameters_;
    std::vector<T> weights_, gradients_;
    std::size_t T_ = 0, R_ = 0;
    MatrixView<const T> x_TD_;
    std::vector<std::uint32_t> expert_TK_, row_TK_;
    std::vector<std::size_t> first_E_;
    Exchange exchange_;
    std::vector<T> scores_TE_, weight_TK_, dweight_TK_;
    std::vector<T> rows_RD_, returned_RD_, arrived_rD_, out_rD_, up_rF_, gate_rF_, hidden_rF_, dhidden_rF_;
    std::size_t router_bytes_ = 0;
    double router_seconds_ = 0, permutation_seconds_ = 0;
};

}  // namespace fived
