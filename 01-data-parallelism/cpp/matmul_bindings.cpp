// Python module dp_matmul_mpi: products of numpy arrays that are cut over the ranks of an mpi4py communicator.
#include "dp_matmul_mpi.hpp"
#include "fived/lesson/product_python.hpp"

namespace {

using namespace fived;

/// The whole of a length of which every rank has a piece, or which every rank has whole.
std::size_t whole(const Communicator& comm, std::size_t n, bool is_cut) {
    const auto total = comm.all_reduce(std::uint64_t(n), is_cut ? MPI_SUM : MPI_MAX);
    return std::size_t(total);
}

/// The product whose pieces have these sizes. Collective.
template <class T>
SplitProduct<T> product(const Communicator& comm, MatrixView<const T> a, MatrixView<const T> b, Split split,
                        std::size_t panels) {
    const Shape shape{whole(comm, a.rows, split == Split::rows),
                      whole(comm, a.columns, split == Split::inner),
                      whole(comm, b.columns, split == Split::columns)};
    return {comm, split, shape, panels};
}

template <class T>
Array<T> multiply(const Array<T>& a, const Array<T>& b, const py::object& comm, const std::string& split,
                  std::size_t panels) {
    const auto how = parse<Split>("split", split);
    return multiplied(a, b, comm, [&](const auto& ranks, auto left, auto right) {
        return product<T>(ranks, left, right, how, panels);
    });
}

template <class T>
std::pair<Array<T>, Array<T>> gradients(const Array<T>& a, const Array<T>& b, const Array<T>& dc,
                                        const py::object& comm, const std::string& split) {
    const auto how = parse<Split>("split", split);
    return gradients_of(a, b, dc, comm, [&](const auto& ranks, auto left, auto right) {
        return product<T>(ranks, left, right, how, 1);
    });
}

template <class T>
void define(py::module_& module) {
    using namespace py::literals;
    module.def(
        "multiply", &multiply<T>, py::arg("a").noconvert(), py::arg("b").noconvert(), "comm"_a,
        "split"_a = "rows", "panels"_a = 1,
        "This rank's piece of A B from its pieces a and b, float32 or float64, C order. Collective.\n"
        "Pieces are cut as fived.collectives.piece cuts. split: rows (A and C by rows), columns (B and C\n"
        "by columns), inner (A by columns, B and C by rows).");
    module.def("gradients", &gradients<T>, py::arg("a").noconvert(), py::arg("b").noconvert(),
               py::arg("dc").noconvert(), "comm"_a, "split"_a = "rows",
               "(dA, dB), cut as A and B are, from this rank's pieces of A, B and dC. Collective.");
}

}  // namespace

PYBIND11_MODULE(dp_matmul_mpi, module) {
    module.doc() = "C = A B on numpy arrays cut over the ranks of an mpi4py communicator.";
    define<double>(module);
    define<float>(module);
}
