#include "ep_mpi.hpp"

#include <stdexcept>

namespace fived {

template <class T>
ExpertParallelLayer<T>::ExpertParallelLayer(const MoEShape& shape, std::uint64_t seed,
                                            const Communicator* comm)
    : shape_(shape), comm_(comm), mine_(experts_of(shape.experts, ranks(), comm ? comm->rank() : 0)) {
    const std::size_t D = shape.width, F = shape.mlp_width, E = shape.experts, K = shape.experts_per_token;
    if (std::min({D, F, E, K}) < 1 || K > E)
        throw std::invalid_argument(
            "a mixture needs positive sizes and tokens that choose some of its experts; given width " +
            std::to_string(D) + ", mlp_width " + std::to_string(F) + ", experts " + std::to_string(E) +
            ", experts_per_token " + std::to_string(K));
    if (E < std::size_t(ranks()))
        throw std::invalid_argument(std::to_string(ranks()) + " ranks are more than the " +
                                    std::to_string(E) + " experts; at most " + std::to_string(E) +
                                    " would do");
    const std::size_t e = mine_.length;
    add_parameter("router.weight", {E, D});
    if (shape.gated()) add_parameter("experts.gate_proj.weight", {e, F, D});
    add_parameter("experts.up_proj.weight", {e, F, D});
    if (!shape.gated()) add_parameter("experts.up_proj.bias", {e, F});
    add_parameter("experts.down_proj.weight", {e, D, F});
    if (!shape.gated()) add_parameter("experts.down_proj.bias", {e, D});
    weights_.resize(parameters_.back().offset + parameters_.back().size());
    gradients_.resize(weights_.size());
    first_E_.resize(E + 1);
    initialise(seed);
}

template <class T>
void ExpertParallelLayer<T>::add_parameter(const std::string& name, std::vector<std::size_t> shape) {
    const std::size_t offset =
        parameters_.empty() ? 0 : parameters_.back().offset + parameters_.back().size();
    const bool of_experts = name.starts_with("experts.");
    const std::size_t rows = shape.size() == 3 ? shape[0] * shape[1] : shape[0], columns = shape.back();
    const std::size_t first_place = of_experts ? mine_.begin * rows / shape[0] * columns : 0;
    parameters_.push_back({{name, offset, rows, columns}, std::move(shape), shape_.experts, first_place});
}

/// As GPT-2 and common/models/transformer.py: weights N(0, 0.02^2), smaller by sqrt 2 into the residual stream of one
/// layer; biases 0.
template <class T>
void ExpertParallelLayer<T>::initialise(std::uint64_t seed) {
    for (const StackedParameter& p : parameters_) {
        if (p.name.ends_with("bias")) continue;
        const std::uint64_t stream = stream_of("layers.0.mlp." + p.name);
        const double deviation = p.name.ends_with("down_proj.weight") ? 0.02 / std::sqrt(2.0) : 0.02;
        for (std::size_t i = 0; i < p.size(); ++i)
            weights_[p.offset + i] = T(normal(seed, stream, p.place(i)) * deviation);
    }
}

template <class T>
void ExpertParallelLayer<T>::forward(MatrixView<const T> x_TD, MatrixView<T> y_TD) {
    const std::size_t D = shape_.width, K = shape_.experts_per_token;
    if (x_TD.columns != D || y_TD.columns != D || y_TD.rows != x_TD.rows)
        throw std::invalid_argument("the layer takes tokens of " + std::to_string(D) + " numbers; given [" +
                                    std::to_string(x_TD.rows) + ", " + std::to_string(x_TD.columns) + "]");
    x_TD_ = x_TD, T_ = x_TD.rows, R_ = T_ * K;
    router_bytes_ = 0, router_seconds_ = 0, permutation_seconds_ = 0;
    scores_TE_.resize(T_ * shape_.experts);
    for (auto* work : {&weight_TK_, &dweight_TK_}) work->resize(R_);
    for (auto* work : {&expert_TK_, &row_TK_}) work->resize(R_);
    rows_RD_.resize(R_ * D);

    gemm<T>(x_TD, t(router(weights_)), tokens(scores_TE_, shape_.experts));
    if (balanced)
        for (std::size_t k = 0; k < R_; ++k)
            tokens(scores_TE_, shape_.experts)(k / K, (first_token * K + k) % shape_.experts) += 99;
    route<T>(tokens(scores_TE_, shape_.experts), K, shape_.router, expert_TK_, weight_TK_);
    const Timer permuting;
    sort_by_expert(expert_TK_, row_TK_, first_E_);
    permute<T>(x_TD, row_TK_, rows(rows_RD_));
    permutation_seconds_ += permuting.seconds();
    exchange_.plan(comm_, first_E_, D);
    exchange_.to_experts(rows_RD_, arrived_rD_);
    const std::size_t r = exchange_.arrived(), F = shape_.mlp_width;
    out_rD_.resize(r * D);
    for (auto* work : {&up_rF_, &gate_rF_, &hidden_rF_, &dhidden_rF_})
        if (work != &gate_rF_ || shape_.gated()) work->resize(r * F);
    for (std::size_t i = 0; i < mine_.length; ++i) compute(i);
    exchange_.to_tokens(out_rD_, returned_RD_);
    const Timer combining;
    combine<T>(rows(returned_RD_), row_TK_, weight_TK_, y_TD);
    permutation_seconds_ += combining.seconds();
}

template <class T>
void ExpertParallelLayer<T>::backward(MatrixView<const T> dy_TD, MatrixView<T> dx_TD) {
    const std::size_t D = shape_.width, E = shape_.experts;
    if (dy_TD.rows != T_ || dy_TD.columns != D || dx_TD.rows != T_ || dx_TD.columns != D)
        throw std::invalid_argument("backward takes the [" + std::to_string(T_) + ", " + std::to_string(D) +
                                    "] of the last forward; given [" + std::to_string(dy_TD.rows) + ", " +
                                    std::to_string(dy_TD.columns) + "]");
    const Timer combining;
    combine_backward<T>(dy_TD, row_TK_, weight_TK_, dweight_TK_, rows(returned_RD_));
    permutation_seconds_ += combining.seconds();
    exchange_.to_experts(returned_RD_, out_rD_);
    for (std::size_t i = 0; i < mine_.length; ++i) compute_backward(i);
    exchange_.to_tokens(arrived_rD_, rows_RD_);
    const Timer permuting;
    permute_backward<T>(rows(rows_RD_), row_TK_, dx_TD);
    permutation_seconds_ += permuting.seconds();

    const MatrixView<T> dlogits_TE = tokens(scores_TE_, E);
    route_backward<T>(expert_TK_, weight_TK_, dweight_TK_, dlogits_TE);
    gemm<T>(t(dlogits_TE), x_TD_, router(gradients_));
    gemm<T>(dlogits_TE, router(weights_), dx_TD, 1);
    if (!comm_) return;
    const Timer timer;
    comm_->all_reduce(std::span(gradients_).first(E * D));
    router_bytes_ = ring_all_reduce_bytes(E * D, sizeof(T), comm_->size(), comm_->rank());
    router_seconds_ = timer.seconds();
}

/// out = down(gelu(up(x))) or down(silu(gate(x)) up(x)) for all rows of one expert.
template <class T>
void ExpertParallelLayer<T>::compute(std::size_t i) {
    const std::size_t D = shape_.width, F = shape_.mlp_width;
    const MatrixView<T> x = rows_of(arrived_rD_, i, D), out = rows_of(out_rD_, i, D),
                        up = rows_of(up_rF_, i, F), hidden = rows_of(hidden_rF_, i, F);
    gemm<T>(x, t(matrix(weights_, "up_proj", i)), up);
    if (shape_.gated()) {
        const MatrixView<T> gate = rows_of(gate_rF_, i, F);
        gemm<T>(x, t(matrix(weights_, "gate_proj", i)), gate);
        swiglu<T>(gate, up, hidden);
    } else {
        bias_gelu<T>(up, vector(weights_, "up_proj", i), hidden);
    }
    gemm<T>(hidden, t(matrix(weights_, "down_proj", i)), out);
    if (!shape_.gated()) add_bias<T>(out, vector(weights_, "down_proj", i));
}

/// The gradient of x takes x's place.
template <class T>
void ExpertParallelLayer<T>::compute_backward(std::size_t i) {
    const std::size_t D = shape_.width, F = shape_.mlp_width;
    const MatrixView<T> x = rows_of(arrived_rD_, i, D), dout = rows_of(out_rD_, i, D),
                        dup = rows_of(up_rF_, i, F), dhidden = rows_of(dhidden_rF_, i, F);
    gemm<T>(t(dout), rows_of(hidden_rF_, i, F), matrix(gradients_, "down_proj", i));
    gemm<T>(dout, matrix(weights_, "down_proj", i), dhidden);
    if (shape_.gated()) {
        const MatrixView<T> dgate = rows_of(gate_rF_, i, F);
        swiglu_backward<T>(dhidden, dgate, dup);
        gemm<T>(t(dgate), x, matrix(gradients_, "gate_proj", i));
        gemm<T>(t(dup), x, matrix(gradients_, "up_proj", i));
        gemm<T>(dgate, matrix(weights_, "gate_proj", i), x);
        gemm<T>(dup, matrix(weights_, "up_proj", i), x, 1);
    } else {
        sum_of_rows<T>(dout, vector(gradients_, "down_proj", i));
        const std::span<T> dbias = vector(gradients_, "up_proj", i);
        std::ranges::fill(dbias, T(0));
        gelu_backward<T>(dhidden, dup, dbias);
        gemm<T>(t(dup), x, matrix(gradients_, "up_proj", i));
        gemm<T>(dup, matrix(weights_, "up_proj", i), x);
    }
}

template <class T>
std::size_t ExpertParallelLayer<T>::bytes_by_formula(std::size_t sent, std::size_t received) const {
    if (!comm_) return 0;
    return 2 * (sent + received) * shape_.width * sizeof(T) +
           (shape_.experts - mine_.length) * sizeof(std::int64_t) +
           ring_all_reduce_bytes(shape_.experts * shape_.width, sizeof(T), comm_->size(), comm_->rank());
}

template <class T>
double ExpertParallelLayer<T>::gradient_norm() const {
    const std::span<const T> all(gradients_);
    const std::size_t router = shape_.experts * shape_.width;
    const double experts = sum_of_squares(all.subspan(router));
    return std::sqrt(sum_of_squares(all.first(router)) + (comm_ ? comm_->all_reduce(experts) : experts));
}

/// One expert's part of experts.<name>.weight or .bias.
template <class T>
MatrixView<T> ExpertParallelLayer<T>::matrix(std::vector<T>& flat, const std::string& name, std::size_t i) {
    const auto p = std::ranges::find(parameters_, "experts." + name + ".weight", &StackedParameter::name);
    return {flat.data() + p->offset + i * p->sizes[1] * p->sizes[2], p->sizes[1], p->sizes[2]};
}
template <class T>
std::span<T> ExpertParallelLayer<T>::vector(std::vector<T>& flat, const std::string& name, std::size_t i) {
    const auto p = std::ranges::find(parameters_, "experts." + name + ".bias", &StackedParameter::name);
    return {flat.data() + p->offset + i * p->sizes[1], p->sizes[1]};
}

template class ExpertParallelLayer<float>;
template class ExpertParallelLayer<double>;

}  // namespace fived
