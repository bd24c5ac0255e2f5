#include "dp_mpi.hpp"

#include <cmath>

#include "fived/record.hpp"

namespace fived {

template <class T>
GradientBuckets<T>::GradientBuckets(const Communicator& comm, std::span<T> gradients,
                                    std::size_t bucket_bytes)
    : comm_(comm), gradients_(gradients), bucket_(std::max<std::size_t>(1, bucket_bytes / sizeof(T))) {
    pending_.reserve(gradients.size() / bucket_ + 1);
}

template <class T>
void GradientBuckets<T>::advance(std::size_t finished) {
    const Timer timer;
    const bool all = finished == gradients_.size();
    while (started_ + bucket_ <= finished || (all && started_ < finished)) {
        const std::size_t n = std::min(bucket_, finished - started_);
        pending_.push_back(comm_.start_all_reduce(gradients_.subspan(started_, n)));
        started_ += n;
    }
    for (Request& request : pending_) request.test();
    exposed_seconds_ += timer.seconds();
}

template <class T>
void GradientBuckets<T>::wait() {
    const Timer timer;
    for (Request& request : pending_) request.wait();
    pending_.clear();
    started_ = 0;
    exposed_seconds_ += timer.seconds();
}

template <class T>
double GradientBuckets<T>::take_exposed_seconds() {
    return std::exchange(exposed_seconds_, 0);
}

template <class T>
DataParallelMlp<T>::DataParallelMlp(const std::vector<int>& sizes, std::uint64_t seed,
                                    const Communicator* comm, std::size_t bucket_bytes, Reduction reduction)
    : mlp_(sizes, seed), comm_(comm && comm->size() > 1 ? comm : nullptr), reduction_(reduction) {
    if (!comm_) return;
    buckets_.emplace(*comm_, mlp_.gradients(), bucket_bytes);
    tree_broadcast(*comm_, mlp_.weights());
}

template <class T>
double DataParallelMlp<T>::loss_and_gradients(MatrixView<const T> x_BI, std::span<const std::uint8_t> y_B,
                                              std::size_t global_count, std::size_t micro_batches) {
    const double scale = 1.0 / double(global_count);
    double loss = 0;
    for (std::size_t m = 0; m < micro_batches; ++m) {
        const bool communicate = comm_ && reduction_ == Reduction::overlapped && m + 1 == micro_batches;
        const auto finished = [&](std::size_t n) {
            if (communicate) buckets_->advance(n);
        };
        const std::size_t begin = cut(x_BI.rows, micro_batches, m),
                          end = cut(x_BI.rows, micro_batches, m + 1);
        loss += mlp_.loss_and_gradients(x_BI.row_block(begin, end - begin), y_B.subspan(begin, end - begin),
                                        scale, m > 0, finished);
    }
    if (!comm_) return loss;
    const std::span<T> gradients = mlp_.gradients();
    if (reduction_ == Reduction::ring) {
        const Timer timer;
        bytes_sent_ = ring_all_reduce(*comm_, gradients);
        exposed_seconds_ = timer.seconds();
    } else {
        buckets_->wait();
        bytes_sent_ = ring_all_reduce_bytes(gradients.size(), sizeof(T), comm_->size(), comm_->rank());
        exposed_seconds_ = buckets_->take_exposed_seconds();
    }
    return comm_->all_reduce(loss);
}

template <class T>
double DataParallelMlp<T>::gradient_norm() {
    return std::sqrt(sum_of_squares<T>(mlp_.gradients()));
}

template class GradientBuckets<float>;
template class GradientBuckets<double>;
template class DataParallelMlp<float>;
template class DataParallelMlp<double>;

}  // namespace fived
