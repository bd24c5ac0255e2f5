#include "dp_mpi.hpp"

#include <cmath>

namespace fived {

template <class T>
DataParallelMlp<T>::DataParallelMlp(const std::vector<int>& sizes, std::uint64_t seed,
                                    const Communicator* comm, const Strategy& how)
    : mlp_(sizes, seed), comm_(comm) {
    if (!comm_) return;
    exchange_ = make_exchange(*comm_, mlp_.gradients(), how);
    tree_broadcast(*comm_, mlp_.weights());
}

template <class T>
double DataParallelMlp<T>::loss_and_gradients(MatrixView<const T> x_BI, std::span<const std::uint8_t> y_B,
                                              std::size_t global_count, std::size_t micro_batches) {
    if (exchange_) exchange_->bytes_sent = 0;
    exposed_seconds_ = 0;
    const double scale = 1.0 / double(global_count);
    double loss = 0;
    for (std::size_t m = 0; m < micro_batches; ++m) {
        const bool communicate = exchange_ && m + 1 == micro_batches;
        const auto finished = [&](std::size_t n) {  // the first n numbers of the flat gradients are final
            if (communicate) in_mpi([&] { exchange_->advance(n); });
        };
        const std::size_t begin = cut(x_BI.rows, micro_batches, m),
                          end = cut(x_BI.rows, micro_batches, m + 1);
        loss += mlp_.loss_and_gradients(x_BI.row_block(begin, end - begin), y_B.subspan(begin, end - begin),
                                        scale, /*accumulate=*/m > 0, finished);
    }
    if (!exchange_) return loss;
    in_mpi([&] { exchange_->finish(); });
    return comm_->all_reduce(loss);
}

template <class T>
double DataParallelMlp<T>::gradient_norm() {
    const double squares = sum_of_squares<T>(owned(mlp_.gradients()));
    return std::sqrt(exchange_ ? exchange_->total(squares) : squares);
}

template <class T>
std::span<T> DataParallelMlp<T>::gather_gradients() {
    if (exchange_) {
        const std::size_t sent = bytes_sent();
        exchange_->gather(mlp_.gradients());
        exchange_->bytes_sent = sent;
    }
    return mlp_.gradients();
}

template class DataParallelMlp<float>;
template class DataParallelMlp<double>;

}  // namespace fived
