// Python module dp_matmul_mpi: products of numpy arrays that are cut over the ranks of an mpi4py communicator.
#include <optional>

#include "dp_matmul_mpi.hpp"
#include "fived/lesson/python.hpp"

namespace {

using namespace fived;

Split split_of(const std::string& name) {
    if (name == "rows") return Split::rows;
    if (name == "columns") return Split::columns;
    if (name == "inner") return Split::inner;
    throw std::invalid_argument("split is " + name + "; it is rows, columns or inner");
}

template <class T>
Array<T> empty(std::size_t rows, std::size_t columns) {
    return Array<T>({rows, columns});
}

/// The whole of a length of which every rank has a piece, or which every rank has whole.
std::size_t whole(const Communicator& comm, std::size_t n, bool is_cut) {
    const auto total = comm.all_reduce(std::uint64_t(n), is_cut ? MPI_SUM : MPI_MAX);
    return std::size_t(total);
}

template <class T>
Shape shape(const Communicator& comm, Split split, MatrixView<const T> a, MatrixView<const T> b) {
    return {whole(comm, a.rows, split == Split::rows), whole(comm, a.columns, split == Split::inner),
            whole(comm, b.columns, split == Split::columns)};
}

template <class T>
Array<T> multiply(const Array<T>& a, const Array<T>& b, const py::object& comm, const std::string& split,
                  std::size_t panels) {
    const Split how = split_of(split);
    const MatrixView<const T> left = matrix(a), right = matrix(b);
    const Communicator ranks = communicator(comm);
    std::optional<SplitProduct<T>> product;
    {
        const py::gil_scoped_release waiting;
        product.emplace(ranks, how, shape<T>(ranks, how, left, right), panels);
    }
    Array<T> c = empty<T>(product->rows_of_c().length, product->columns_of_c().length);
    const MatrixView<T> result = writable_matrix(c);
    const py::gil_scoped_release waiting;
    product->multiply(left, right, result);
    return c;
}

template <class T>
std::pair<Array<T>, Array<T>> gradients(const Array<T>& a, const Array<T>& b, const Array<T>& dc,
                                        const py::object& comm, const std::string& split) {
    const Split how = split_of(split);
    const MatrixView<const T> left = matrix(a), right = matrix(b), dresult = matrix(dc);
    const Communicator ranks = communicator(comm);
    auto da = empty<T>(left.rows, left.columns), db = empty<T>(right.rows, right.columns);
    const MatrixView<T> dleft = writable_matrix(da), dright = writable_matrix(db);
    const py::gil_scoped_release waiting;
    SplitProduct<T> product(ranks, how, shape<T>(ranks, how, left, right));
    product.gradients(left, right, dresult, dleft, dright);
    return {da, db};
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
