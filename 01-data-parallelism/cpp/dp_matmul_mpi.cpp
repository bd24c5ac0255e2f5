#include "dp_matmul_mpi.hpp"

#include <algorithm>
#include <stdexcept>

namespace fived {

template <class T>
SplitProduct<T>::SplitProduct(const Communicator& comm, Split split, Shape whole, std::size_t panels)
    : comm_(comm), split_(split), whole_(whole), panels_(std::max<std::size_t>(1, panels)) {
    if (split == Split::inner && comm.size() > 1) {
        block_ = (whole.M + comm.size() - 1) / comm.size() * whole.J;
        space_ = std::make_unique<T[]>(2 * block_);
    }
}

template <class T>
void SplitProduct<T>::check(MatrixView<const T> a, MatrixView<const T> b, MatrixView<const T> c) const {
    check_piece("piece of A", a, rows_of_a(), columns_of_a());
    check_piece("piece of B", b, rows_of_b(), columns_of_b());
    check_piece("piece of C", c, rows_of_c(), columns_of_c());
    if (c.stride != c.columns) throw std::invalid_argument("C has gaps between its rows");
}

template <class T>
void SplitProduct<T>::multiply(MatrixView<const T> a, MatrixView<const T> b, MatrixView<T> c) {
    check(a, b, c);
    sent_ = 0;
    if (split_ == Split::inner && comm_.size() > 1)
        pass_c(a, b, c);
    else
        gemm<T>(a, b, c);
}

/// A block's rows in panels: each leaves for the next rank as soon as this rank's term is in it.
template <class T>
void SplitProduct<T>::pass_c(MatrixView<const T> a, MatrixView<const T> b, MatrixView<T> c) {
    const int P = comm_.size(), rank = comm_.rank(), next = (rank + 1) % P, previous = (rank + P - 1) % P;
    const auto rows_at = [&](int step) { return block(rank - 1 - step); };
    const auto panel = [&](int step, std::size_t p) {
        const MatrixView<T> place =
            step == P - 1 ? c : MatrixView<T>(room(step), rows_at(step).length, whole_.J);
        const std::size_t begin = cut(place.rows, panels_, p);
        return place.row_block(begin, cut(place.rows, panels_, p + 1) - begin);
    };
    const auto elements = [](MatrixView<T> x) { return std::span(x.data, x.rows * x.columns); };
    std::vector<std::vector<Request>> sends(P), arriving(P);
    for (int step = 0; step < P; ++step) {
        for (Request& send : sends[std::max(0, step - 1)]) send.wait();  // they read what now receives
        for (std::size_t p = 0; p < panels_ && step + 1 < P; ++p)
            arriving[step + 1].push_back(
                comm_.start_receive(elements(panel(step + 1, p)), previous, step + 1));
        for (std::size_t p = 0; p < panels_; ++p) {
            const MatrixView<T> mine = panel(step, p);
            const std::size_t begin = rows_at(step).begin + cut(rows_at(step).length, panels_, p);
            if (step > 0) arriving[step][p].wait();
            gemm<T>(a.row_block(begin, mine.rows), b, mine, step > 0 ? T(1) : T(0));
            if (step + 1 == P) continue;
            sends[step].push_back(comm_.start_send(elements(mine), next, step + 1));
            sent_ += elements(mine).size_bytes();
            for (Request& request : arriving[step + 1])
                request.test();  // MPI moves data only inside its calls
        }
    }
    for (Request& send : sends[P - 2]) send.wait();
}

template <class T>
void SplitProduct<T>::gradients(MatrixView<const T> a, MatrixView<const T> b, MatrixView<const T> dc,
                                MatrixView<T> da, MatrixView<T> db) {
    check(a, b, dc);
    sent_ = 0;
    if (split_ == Split::inner && comm_.size() > 1) {
        pass_dc(a, b, dc, da, db);
        return;
    }
    gemm<T>(dc, t(b), da);
    gemm<T>(t(a), dc, db);
    if (split_ == Split::rows) sent_ = ring_all_reduce(comm_, std::span(db.data, db.rows * db.columns));
    if (split_ == Split::columns) sent_ = ring_all_reduce(comm_, std::span(da.data, da.rows * da.columns));
}

/// Every block of dC comes by once; a rank computes with one while the next arrives.
template <class T>
void SplitProduct<T>::pass_dc(MatrixView<const T> a, MatrixView<const T> b, MatrixView<const T> dc,
                              MatrixView<T> da, MatrixView<T> db) {
    const int P = comm_.size(), rank = comm_.rank(), next = (rank + 1) % P, previous = (rank + P - 1) % P;
    MatrixView<const T> here = dc;
    for (int step = 0; step < P; ++step) {
        const Range rows = block(rank - step);
        Request send, receive;
        MatrixView<T> coming;
        if (step + 1 < P) {
            coming = {room(step), block(rank - step - 1).length, whole_.J};
            receive = comm_.start_receive(std::span(coming.data, coming.rows * coming.columns), previous);
            send = comm_.start_send(std::span(here.data, here.rows * here.columns), next);
            sent_ += here.rows * here.columns * sizeof(T);
        }
        gemm<T>(here, t(b), da.row_block(rows.begin, rows.length));
        receive.test();
        gemm<T>(t(a.row_block(rows.begin, rows.length)), here, db, step > 0 ? T(1) : T(0));
        receive.wait();
        send.wait();
        here = coming;
    }
}

template <class T>
std::size_t SplitProduct<T>::bytes_forward() const {
    if (split_ != Split::inner) return 0;
    return (whole_.M - block(comm_.rank()).length) * whole_.J * sizeof(T);
}

template <class T>
std::size_t SplitProduct<T>::bytes_backward() const {
    if (split_ == Split::inner) return (whole_.M - block(comm_.rank() + 1).length) * whole_.J * sizeof(T);
    const std::size_t n = whole_.K * (split_ == Split::rows ? whole_.J : whole_.M);
    return ring_all_reduce_bytes(n, sizeof(T), comm_.size(), comm_.rank());
}

template class SplitProduct<float>;
template class SplitProduct<double>;

}  // namespace fived
