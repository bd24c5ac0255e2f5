#include "tp_mpi.hpp"

#include <stdexcept>

#include "tp_kernels.hpp"

namespace fived {

template <class T>
TensorParallelLayer<T>::TensorParallelLayer(const LayerShape& shape, std::uint64_t seed,
                                            const Communicator* comm, Reduction reduction)
    : shape_(shape), comm_(comm), reduction_(reduction) {
    const std::size_t D = shape.width, H = shape.heads, F = shape.mlp_width, P = comm ? comm->size() : 1;
    if (std::min({D, H, F}) < 1 || D % H)
        throw std::invalid_argument(
            "a layer needs positive sizes and heads that divide its width; given width " + std::to_string(D) +
            ", heads " + std::to_string(H) + ", mlp_width " + std::to_string(F));
    if (std::min(H, F) < P)
        throw std::invalid_argument(std::to_string(H) + " heads and " + std::to_string(F) +
                                    " columns of the MLP cannot be split over " + std::to_string(P) +
                                    " ranks; use at most " + std::to_string(std::min(H, F)));
    const std::size_t r = comm ? comm->rank() : 0;
    heads_ = shard_of(H, P, r).length, a_ = heads_ * shape.head_width(), f_ = shard_of(F, P, r).length;
    add_parameter("attention_norm.weight", D, 1);
    add_parameter("attention_norm.bias", D, 1);
    // q, k and v lie one after the other: one product makes all three.
    for (const char* name : {"q_proj", "k_proj", "v_proj"})
        add_parameter(std::string("attention.") + name + ".weight", D, D, Cut::rows_by_heads);
    for (const char* name : {"q_proj", "k_proj", "v_proj"})
        add_parameter(std::string("attention.") + name + ".bias", D, 1, Cut::rows_by_heads);
    add_parameter("attention.o_proj.weight", D, D, Cut::columns_by_heads);
    add_parameter("attention.o_proj.bias", D, 1);
    add_parameter("mlp_norm.weight", D, 1);
    add_parameter("mlp_norm.bias", D, 1);
    add_parameter("mlp.up_proj.weight", F, D, Cut::rows_evenly);
    add_parameter("mlp.up_proj.bias", F, 1, Cut::rows_evenly);
    add_parameter("mlp.down_proj.weight", D, F, Cut::columns_evenly);
    add_parameter("mlp.down_proj.bias", D, 1);
    weights_.resize(parameters_.back().offset + parameters_.back().size());
    gradients_.resize(weights_.size());
    initialise(seed);
}

template <class T>
void TensorParallelLayer<T>::add_parameter(const std::string& name, std::size_t rows, std::size_t columns,
                                           Cut how) {
    const std::size_t P = comm_ ? comm_->size() : 1, r = comm_ ? comm_->rank() : 0;
    const std::size_t offset =
        parameters_.empty() ? 0 : parameters_.back().offset + parameters_.back().size();
    Shard shard{{name, offset, rows, columns}, rows, columns};
    const std::size_t by_heads = shard_of(shape_.heads, P, r).begin * shape_.head_width(),
                      evenly = shard_of(shape_.mlp_width, P, r).begin;
    switch (how) {
        case Cut::whole:
            break;
        case Cut::rows_by_heads:
            shard.first_row = by_heads, shard.rows = a_;
            break;
        case Cut::columns_by_heads:
            shard.first_column = by_heads, shard.columns = a_;
            break;
        case Cut::rows_evenly:
            shard.first_row = evenly, shard.rows = f_;
            break;
        case Cut::columns_evenly:
            shard.first_column = evenly, shard.columns = f_;
            break;
    }
    parameters_.push_back(shard);
}

template <class T>
void TensorParallelLayer<T>::initialise(std::uint64_t seed) {
    for (const Shard& p : parameters_) {
        const Gpt2Initial value("layers.0." + p.name, 1, seed);
        for (std::size_t i = 0; i < p.size(); ++i) weights_[p.offset + i] = T(value(p.place(i)));
    }
}

template <class T>
void TensorParallelLayer<T>::forward(MatrixView<const T> x_ND, std::size_t sequence, MatrixView<T> y_ND) {
    const std::size_t D = shape_.width;
    if (x_ND.columns != D || y_ND.columns != D || y_ND.rows != x_ND.rows || sequence < 1 ||
        x_ND.rows % sequence)
        throw std::invalid_argument("the layer takes whole sequences of " + std::to_string(D) +
                                    " numbers; given [" + std::to_string(x_ND.rows) + ", " +
                                    std::to_string(x_ND.columns) + "] in sequences of " +
                                    std::to_string(sequence));
    reserve(x_ND.rows, sequence);
    bytes_sent_ = 0, communication_seconds_ = 0;
    x_ND_ = x_ND;
    const T epsilon = T(shape_.epsilon);
    const MatrixView<T> sum_ND = tokens(sum_, D), a_ND = tokens(a_ND_, D);

    layer_norm<T>(x_ND, vector(weights_, "attention_norm.weight"), vector(weights_, "attention_norm.bias"),
                  epsilon, tokens(attention_norm_.standard_ND, D), attention_norm_.scale_N,
                  tokens(attention_norm_.y_ND, D));
    const MatrixView<T> qkv(qkv_.data(), N_, 3 * a_);
    gemm<T>(tokens(attention_norm_.y_ND, D), t(qkv_weight(weights_)), qkv);
    add_bias<T>(qkv, qkv_bias(weights_));
    attend();
    gemm<T>(tokens(attended_, a_), t(matrix(weights_, "attention.o_proj.weight")), sum_ND);
    all_reduce(sum_ND);
    add_with_bias<T>(x_ND, sum_ND, vector(weights_, "attention.o_proj.bias"), a_ND);

    layer_norm<T>(a_ND, vector(weights_, "mlp_norm.weight"), vector(weights_, "mlp_norm.bias"), epsilon,
                  tokens(mlp_norm_.standard_ND, D), mlp_norm_.scale_N, tokens(mlp_norm_.y_ND, D));
    gemm<T>(tokens(mlp_norm_.y_ND, D), t(matrix(weights_, "mlp.up_proj.weight")), tokens(up_, f_));
    bias_gelu<T>(tokens(up_, f_), vector(weights_, "mlp.up_proj.bias"), tokens(gelu_, f_));
    gemm<T>(tokens(gelu_, f_), t(matrix(weights_, "mlp.down_proj.weight")), sum_ND);
    all_reduce(sum_ND);
    add_with_bias<T>(a_ND, sum_ND, vector(weights_, "mlp.down_proj.bias"), y_ND);
}

template <class T>
void TensorParallelLayer<T>::backward(MatrixView<const T> dy_ND, MatrixView<T> dx_ND) {
    const std::size_t D = shape_.width;
    if (dy_ND.rows != N_ || dy_ND.columns != D || dx_ND.rows != N_ || dx_ND.columns != D || N_ == 0)
        throw std::invalid_argument("backward takes the [" + std::to_string(N_) + ", " + std::to_string(D) +
                                    "] of the last forward; given [" + std::to_string(dy_ND.rows) + ", " +
                                    std::to_string(dy_ND.columns) + "]");
    const MatrixView<T> sum_ND = tokens(sum_, D);
    for (const Shard& p : parameters_)  // those of matrices are written, not added to
        if (p.is_vector()) std::ranges::fill(vector(gradients_, p.name), T(0));

    // y = a + down(gelu(up(norm(a))))
    sum_of_rows<T>(dy_ND, vector(gradients_, "mlp.down_proj.bias"));
    gemm<T>(t(dy_ND), tokens(gelu_, f_), matrix(gradients_, "mlp.down_proj.weight"));
    gemm<T>(dy_ND, matrix(weights_, "mlp.down_proj.weight"), tokens(dgelu_, f_));
    const MatrixView<T> dup = tokens(up_, f_);  // holds GELU'(up) until now
    gelu_backward<T>(tokens(dgelu_, f_), dup, vector(gradients_, "mlp.up_proj.bias"));
    gemm<T>(t(dup), tokens(mlp_norm_.y_ND, D), matrix(gradients_, "mlp.up_proj.weight"));
    gemm<T>(dup, matrix(weights_, "mlp.up_proj.weight"), sum_ND);
    all_reduce(sum_ND);
    for (std::size_t n = 0; n < N_; ++n) std::ranges::copy(dy_ND.row(n), dx_ND.row(n).begin());
    layer_norm_backward<T>(sum_ND, tokens(mlp_norm_.standard_ND, D), mlp_norm_.scale_N,
                           vector(weights_, "mlp_norm.weight"), vector(gradients_, "mlp_norm.weight"),
                           vector(gradients_, "mlp_norm.bias"), dx_ND);

    // a = x + o(attend(qkv(norm(x)))); dx is the gradient of a until here
    sum_of_rows<T>(dx_ND, vector(gradients_, "attention.o_proj.bias"));
    gemm<T>(t(dx_ND), tokens(attended_, a_), matrix(gradients_, "attention.o_proj.weight"));
    gemm<T>(dx_ND, matrix(weights_, "attention.o_proj.weight"), tokens(dattended_, a_));
    attend_backward();
    const MatrixView<T> dqkv(dqkv_.data(), N_, 3 * a_);
    sum_of_rows<T>(dqkv, qkv_bias(gradients_));
    gemm<T>(t(dqkv), tokens(attention_norm_.y_ND, D), qkv_weight(gradients_));
    gemm<T>(dqkv, qkv_weight(weights_), sum_ND);
    all_reduce(sum_ND);
    layer_norm_backward<T>(sum_ND, tokens(attention_norm_.standard_ND, D), attention_norm_.scale_N,
                           vector(weights_, "attention_norm.weight"),
                           vector(gradients_, "attention_norm.weight"),
                           vector(gradients_, "attention_norm.bias"), dx_ND);
}

/// This rank's heads, one after the other: the matrix of weights is whole, and its later half 0.
template <class T>
void TensorParallelLayer<T>::attend() {
    const T scale = T(1 / std::sqrt(double(shape_.head_width())));
    for (std::size_t b = 0; b < N_ / S_; ++b)
        for (std::size_t h = 0; h < heads_; ++h) {
            const MatrixView<T> p_SS = weights_of_head(b, h);
            gemm<T>(head(qkv_, b, 0, h), t(head(qkv_, b, 1, h)), p_SS);
            causal_softmax<T>(p_SS, scale);
            gemm<T>(p_SS, head(qkv_, b, 2, h), head(attended_, b, h));
        }
}

template <class T>
void TensorParallelLayer<T>::attend_backward() {
    const T scale = T(1 / std::sqrt(double(shape_.head_width())));
    const MatrixView<T> ds_SS(dp_.data(), S_, S_);
    for (std::size_t b = 0; b < N_ / S_; ++b)
        for (std::size_t h = 0; h < heads_; ++h) {
            const MatrixView<T> p_SS = weights_of_head(b, h), dout_SK = head(dattended_, b, h);
            gemm<T>(t(p_SS), dout_SK, head(dqkv_, b, 2, h));
            gemm<T>(dout_SK, t(head(qkv_, b, 2, h)), ds_SS);
            softmax_backward<T>(p_SS, scale, ds_SS);
            gemm<T>(ds_SS, head(qkv_, b, 1, h), head(dqkv_, b, 0, h));
            gemm<T>(t(ds_SS), head(qkv_, b, 0, h), head(dqkv_, b, 1, h));
        }
}

template <class T>
void TensorParallelLayer<T>::all_reduce(MatrixView<T> terms_ND) {
    if (!comm_ || !communicate) return;
    const std::span<T> terms(terms_ND.data, terms_ND.rows * terms_ND.columns);
    const Timer timer;
    if (reduction_ == Reduction::ring) {
        bytes_sent_ += ring_all_reduce(*comm_, terms);
    } else {
        comm_->all_reduce(terms);
        bytes_sent_ += ring_all_reduce_bytes(terms.size(), sizeof(T), comm_->size(), comm_->rank());
    }
    communication_seconds_ += timer.seconds();
}

template <class T>
std::size_t TensorParallelLayer<T>::bytes_by_formula(std::size_t tokens) const {
    return comm_ ? 4 * ring_all_reduce_bytes(tokens * shape_.width, sizeof(T), comm_->size(), comm_->rank())
                 : 0;
}

template <class T>
double TensorParallelLayer<T>::gradient_norm() const {
    double split = 0, replicated = 0;
    for (const Shard& p : parameters_)
        (p.split() ? split : replicated) +=
            sum_of_squares(std::span<const T>(gradients_.data() + p.offset, p.size()));
    return std::sqrt((comm_ ? comm_->all_reduce(split) : split) + replicated);
}

/// Workspaces grow to the largest input seen and stay: a step allocates nothing.
template <class T>
void TensorParallelLayer<T>::reserve(std::size_t tokens, std::size_t sequence) {
    N_ = tokens, S_ = sequence;
    const auto grow = [](std::vector<T>& work, std::size_t n) {
        if (work.size() < n) work.resize(n);
    };
    const std::size_t D = shape_.width;
    for (Norm* norm : {&attention_norm_, &mlp_norm_})
        grow(norm->standard_ND, N_ * D), grow(norm->y_ND, N_ * D), grow(norm->scale_N, N_);
    for (auto* work : {&qkv_, &dqkv_}) grow(*work, N_ * 3 * a_);
    for (auto* work : {&attended_, &dattended_}) grow(*work, N_ * a_);
    for (auto* work : {&up_, &gelu_, &dgelu_}) grow(*work, N_ * f_);
    for (auto* work : {&a_ND_, &sum_}) grow(*work, N_ * D);
    grow(p_, N_ * S_ * heads_), grow(dp_, S_ * S_);
}

/// The positions of one sample and the columns of its head h: of q (0), k (1) or v (2).
template <class T>
MatrixView<T> TensorParallelLayer<T>::head(std::vector<T>& qkv, std::size_t sample, std::size_t which,
                                           std::size_t h) {
    const std::size_t K = shape_.head_width();
    return {qkv.data() + sample * S_ * 3 * a_ + which * a_ + h * K, S_, K, 3 * a_};
}
template <class T>
MatrixView<T> TensorParallelLayer<T>::head(std::vector<T>& attended, std::size_t sample, std::size_t h) {
    const std::size_t K = shape_.head_width();
    return {attended.data() + sample * S_ * a_ + h * K, S_, K, a_};
}
template <class T>
MatrixView<T> TensorParallelLayer<T>::weights_of_head(std::size_t sample, std::size_t h) {
    return {p_.data() + (sample * heads_ + h) * S_ * S_, S_, S_};
}

template <class T>
const Shard& TensorParallelLayer<T>::named(const std::string& name) const {
    const auto found = std::ranges::find(parameters_, name, [](const Shard& p) { return p.name; });
    if (found == parameters_.end()) throw std::invalid_argument("the layer has no parameter " + name);
    return *found;
}
template <class T>
MatrixView<T> TensorParallelLayer<T>::matrix(std::vector<T>& flat, const std::string& name) {
    const Shard& p = named(name);
    return {flat.data() + p.offset, p.rows, p.columns};
}
template <class T>
std::span<T> TensorParallelLayer<T>::vector(std::vector<T>& flat, const std::string& name) {
    return {flat.data() + named(name).offset, named(name).rows};
}
template <class T>
MatrixView<T> TensorParallelLayer<T>::qkv_weight(std::vector<T>& flat) {
    return {flat.data() + named("attention.q_proj.weight").offset, 3 * a_, shape_.width};
}
template <class T>
std::span<T> TensorParallelLayer<T>::qkv_bias(std::vector<T>& flat) {
    return {flat.data() + named("attention.q_proj.bias").offset, 3 * a_};
}

template class TensorParallelLayer<float>;
template class TensorParallelLayer<double>;

}  // namespace fived
