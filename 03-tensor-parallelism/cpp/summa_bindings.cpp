// Python module tp_summa_mpi: products of numpy arrays that are cut over a grid of ranks.
#include <optional>

#include "fived/lesson/product_python.hpp"
#include "tp_summa_mpi.hpp"

namespace {

using namespace fived;

using GridArgument = std::optional<std::pair<int, int>>;

/// The product whose blocks have these sizes; the whole sizes are those of all blocks together. Collective.
template <class T>
Summa<T> product(const Communicator& ranks, const GridArgument& given, MatrixView<const T> a,
                 MatrixView<const T> b, std::size_t panels, Carrier carrier, bool overlap) {
    const GridShape grid = given ? GridShape{given->first, given->second} : most_square(ranks.size());
    if (grid.rows < 1 || grid.columns < 1 || grid.rows * grid.columns != ranks.size())
        throw std::invalid_argument("a grid of " + std::to_string(grid.rows) + " x " +
                                    std::to_string(grid.columns) + " is not one of " +
                                    std::to_string(ranks.size()) + " ranks");
    const bool first_column = ranks.rank() % grid.columns == 0, first_row = ranks.rank() < grid.columns;
    const auto sum = [&](std::size_t n) { return std::size_t(ranks.all_reduce(std::uint64_t(n), MPI_SUM)); };
    const Shape whole{sum(first_column ? a.rows : 0), sum(first_row ? a.columns : 0),
                      sum(first_row ? b.columns : 0)};
    return {ranks, grid, whole, panels, carrier, overlap};
}

template <class T>
Array<T> multiply(const Array<T>& a, const Array<T>& b, const py::object& comm, const GridArgument& grid,
                  std::size_t panels, const std::string& carrier, bool overlap) {
    const auto how = parse<Carrier>("carrier", carrier);
    return multiplied(a, b, comm, [&](const auto& ranks, auto left, auto right) {
        return product<T>(ranks, grid, left, right, panels, how, overlap);
    });
}

template <class T>
std::pair<Array<T>, Array<T>> gradients(const Array<T>& a, const Array<T>& b, const Array<T>& dc,
                                        const py::object& comm, const GridArgument& grid, std::size_t panels,
                                        const std::string& carrier) {
    const auto how = parse<Carrier>("carrier", carrier);
    return gradients_of(a, b, dc, comm, [&](const auto& ranks, auto left, auto right) {
        return product<T>(ranks, grid, left, right, panels, how, false);
    });
}

template <class T>
void define(py::module_& module) {
    using namespace py::literals;
    module.def(
        "multiply", &multiply<T>, py::arg("a").noconvert(), py::arg("b").noconvert(), "comm"_a,
        "grid"_a = py::none(), "panels"_a = 1, "carrier"_a = "mpi", "overlap"_a = true,
        "This rank's block of A B from its blocks a and b, float32 or float64, C order. Collective.\n"
        "grid: (rows, columns) of ranks, the most square one by default; rank = row * columns + column.\n"
        "A is cut by rows over the grid's rows and by columns over its columns, and so are B and C, as\n"
        "fived.collectives.piece cuts. carrier: mpi (MPI_Ibcast), host (memory that ranks of one host\n"
        "share). Raises ValueError where blocks or the grid do not fit.");
    module.def("gradients", &gradients<T>, py::arg("a").noconvert(), py::arg("b").noconvert(),
               py::arg("dc").noconvert(), "comm"_a, "grid"_a = py::none(), "panels"_a = 1,
               "carrier"_a = "mpi",
               "(dA, dB), cut as A and B are, from this rank's blocks of A, B and dC. Collective.");
}

}  // namespace

PYBIND11_MODULE(tp_summa_mpi, module) {
    module.doc() = "C = A B on numpy arrays cut over a grid of the ranks of an mpi4py communicator.";
    define<double>(module);
    define<float>(module);
}
