// Products of cut matrices as Python calls: make(ranks, a, b) makes a product from this rank's pieces. Collective.
#pragma once

#include <utility>

#include "fived/lesson/python.hpp"

namespace fived {

/// This rank's piece of A B.
template <class T, class Make>
Array<T> multiplied(const Array<T>& a, const Array<T>& b, const py::object& comm, Make make) {
    const MatrixView<const T> left = matrix(a), right = matrix(b);
    const Communicator ranks = communicator(comm);
    auto product = [&] {
        const py::gil_scoped_release waiting;
        return make(ranks, left, right);
    }();
    Array<T> c({product.rows_of_c().length, product.columns_of_c().length});
    const MatrixView<T> result = writable_matrix(c);
    const py::gil_scoped_release waiting;
    product.multiply(left, right, result);
    return c;
}

/// This rank's pieces of dA and dB.
template <class T, class Make>
std::pair<Array<T>, Array<T>> gradients_of(const Array<T>& a, const Array<T>& b, const Array<T>& dc,
                                           const py::object& comm, Make make) {
    const MatrixView<const T> left = matrix(a), right = matrix(b), dresult = matrix(dc);
    const Communicator ranks = communicator(comm);
    Array<T> da({left.rows, left.columns}), db({right.rows, right.columns});
    const MatrixView<T> dleft = writable_matrix(da), dright = writable_matrix(db);
    {
        const py::gil_scoped_release waiting;
        make(ranks, left, right).gradients(left, right, dresult, dleft, dright);
    }
    return {da, db};
}

}  // namespace fived
