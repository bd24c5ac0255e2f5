#include "pp_mpi.hpp"

#include <cmath>

namespace fived {

template <class T>
Pipeline<T>::Pipeline(const std::vector<int>& sizes, std::uint64_t seed, const Communicator& comm,
                      Schedule schedule)
    : comm_(comm), runner_(comm, std::move(schedule)), stages_(sizes, seed, runner_.mine(), buffers_) {
    const int stages = this->schedule().stages();
    if (stages >= int(sizes.size()))
        throw std::invalid_argument(std::to_string(sizes.size() - 1) + " layers are too few for " +
                                    std::to_string(stages) + " stages");
}

template <class T>
double Pipeline<T>::loss_and_gradients(MatrixView<const T> x_BI, std::span<const std::uint8_t> y_B) {
    const std::size_t M = schedule().micro_batches;
    stages_.check_samples(x_BI, y_B);
    if (x_BI.rows < M)
        throw std::invalid_argument("a batch of " + std::to_string(x_BI.rows) + " cannot be cut into " +
                                    std::to_string(M) + " micro-batches");
    x_BI_ = x_BI, y_B_ = y_B;
    buffers_.resize((x_BI.rows + M - 1) / M * stages_.widest());
    stages_.clear_bias_gradients();
    written_.assign(schedule().stages(), false);
    loss_ = 0;
    runner_.run(*this, buffers_);
    const Timer waiting;
    loss_ = comm_.all_reduce(loss_);
    summing_seconds_ = waiting.seconds();
    return loss_;
}

template <class T>
typename Pipeline<T>::Buffer Pipeline<T>::forward(const Instruction& i, Buffer x) {
    const auto [begin, n] = rows(i.micro);
    Kept<T>& kept = kept_[{i.stage, i.micro}];
    kept.input = std::move(x);
    kept.x_BI = i.stage == 0 ? x_BI_.row_block(begin, n)
                             : MatrixView<const T>(kept.input.get(), n, stages_.width(i.stage));
    Buffer out = stages_.forward(i.stage, kept, [this] { runner_.progress(); });
    // Each loss is divided by the samples of the whole batch: micro-batches may differ in size.
    // The last stage has no output.
    if (!out) loss_ += stages_.loss(kept, y_B_.subspan(begin, n), 1 / double(y_B_.size()));
    return out;
}

template <class T>
typename Pipeline<T>::Buffer Pipeline<T>::backward_input(const Instruction& i, Buffer dy) {
    return stages_.backward_input(i.stage, kept_.at({i.stage, i.micro}), std::move(dy),
                                  [this] { runner_.progress(); });
}

template <class T>
void Pipeline<T>::backward_weights(const Instruction& i) {
    auto kept = kept_.extract({i.stage, i.micro});
    stages_.backward_weights(i.stage, std::move(kept.mapped()), written_[i.stage],
                             [this] { runner_.progress(); });
    written_[i.stage] = true;
}

/// First row and number of rows.
template <class T>
std::pair<std::size_t, std::size_t> Pipeline<T>::rows(int micro) const {
    const std::size_t begin = cut(y_B_.size(), schedule().micro_batches, micro);
    return {begin, cut(y_B_.size(), schedule().micro_batches, micro + 1) - begin};
}

/// The numbers of a message: rows x width where the two stages meet.
template <class T>
std::size_t Pipeline<T>::numbers(const Instruction& i) const {
    return rows(i.micro).second * stages_.width(std::max(i.stage, i.other_end().stage));
}

template <class T>
double Pipeline<T>::gradient_norm() {
    return std::sqrt(comm_.all_reduce(sum_of_squares<T>(gradients())));
}

template <class T>
std::size_t Pipeline<T>::bytes_by_formula(std::size_t batch) const {
    std::size_t widths = 0;
    for (int s = 1; s < schedule().stages(); ++s) {
        const int before = schedule().owner[s - 1], after = schedule().owner[s];
        if (before != after && (before == comm_.rank() || after == comm_.rank())) widths += stages_.width(s);
    }
    return batch * widths * sizeof(T);
}

template class Pipeline<float>;
template class Pipeline<double>;

}  // namespace fived
