// Python module fived: the shared C++ parts on numpy arrays and mpi4py communicators.
#include "fived/lesson/python.hpp"
#include "fived/lesson/record.hpp"
#include "fived/lesson/text.hpp"
#include "fived/math/blas.hpp"
#include "fived/math/random.hpp"
#include "fived/mpi/collectives.hpp"

namespace {

using namespace fived;
using namespace py::literals;
using Release = py::call_guard<py::gil_scoped_release>;

/// Defines `name(comm, array, ...)` for float32 and float64 arrays, changed in place. GIL released while
/// waiting.
template <class F, class D, class... Extra>
void define(py::module_& module, const char* name, const char* doc, F for_float, D for_double,
            const Extra&... extra) {
    module.def(name, for_float, "comm"_a, py::arg("array").noconvert(), extra..., doc);
    module.def(name, for_double, "comm"_a, py::arg("array").noconvert(), extra..., doc);
}

template <class T>
auto in_place(std::size_t (*collective)(const Communicator&, std::span<T>)) {
    return [collective](const Communicator& comm, Array<T>& array) {
        const std::span<T> data = writable(array);
        const py::gil_scoped_release waiting;
        return collective(comm, data);
    };
}

template <class T>
auto all_reduce() {
    return [](const Communicator& comm, Array<T>& array, int times) {
        const std::span<T> data = writable(array);
        const py::gil_scoped_release waiting;
        for (int i = 0; i < times; ++i) comm.all_reduce(data);
    };
}

template <class T>
auto broadcast() {
    return [](const Communicator& comm, Array<T>& array, int root) {
        const std::span<T> data = writable(array);
        const py::gil_scoped_release waiting;
        return tree_broadcast(comm, data, root);
    };
}

template <class T>
auto send() {
    return [](const Communicator& comm, const Array<T>& array, int to, int tag) {
        const std::span<const T> data = readable(array);
        const py::gil_scoped_release waiting;
        comm.send(data, to, tag);
    };
}

template <class T>
auto receive() {
    return [](const Communicator& comm, Array<T>& array, int from, int tag) {
        const std::span<T> data = writable(array);
        const py::gil_scoped_release waiting;
        comm.receive(data, from, tag);
    };
}

template <class T>
Array<T> product(const Array<T>& a, const Array<T>& b, bool transpose_a, bool transpose_b) {
    const Factor<T> left(matrix(a), transpose_a), right(matrix(b), transpose_b);
    Array<T> c({left.rows(), right.columns()});
    const MatrixView<T> result(c.mutable_data(), left.rows(), right.columns());
    const py::gil_scoped_release computing;
    gemm<T>(left, right, result);
    return c;
}

void bind_mpi(py::module_ module) {
    py::register_exception<MpiError>(module, "MpiError", PyExc_RuntimeError);
    py::class_<Communicator> comm(module, "Communicator",
                                  "A duplicate of an mpi4py communicator. Collective to make.");
    comm.def(py::init(&communicator), "comm"_a)
        .def_property_readonly("rank", &Communicator::rank)
        .def_property_readonly("size", &Communicator::size)
        .def_property_readonly("name", &Communicator::name)
        .def("split", &Communicator::split, "color"_a, "key"_a, "name"_a, Release())
        .def("dup", &Communicator::dup, "name"_a = "", Release())
        .def("barrier", &Communicator::barrier, Release())
        .def("__repr__", [](const Communicator& self) {
            return "<fived.mpi.Communicator '" + self.name() + "' rank " + std::to_string(self.rank()) +
                   " of " + std::to_string(self.size()) + ">";
        });
    define(module, "all_reduce", "MPI_Allreduce, the sum in place; several times, to be timed.",
           all_reduce<float>(), all_reduce<double>(), "times"_a = 1);
    define(module, "send", "Blocking.", send<float>(), send<double>(), "to"_a, "tag"_a = 0);
    define(module, "receive", "Blocking; the length must match.", receive<float>(), receive<double>(),
           "source"_a, "tag"_a = 0);
}

void bind_collectives(py::module_ module) {
    module.doc() =
        "Written from point-to-point messages, in place; each returns the bytes that this rank sent.";
    define(module, "ring_reduce_scatter", "P -> S: piece r ends as the sum.",
           in_place<float>(ring_reduce_scatter), in_place<double>(ring_reduce_scatter));
    define(module, "ring_all_gather", "S -> R: every rank ends with all pieces.",
           in_place<float>(ring_all_gather), in_place<double>(ring_all_gather));
    define(module, "ring_all_reduce", "P -> R: the sum; for long arrays.", in_place<float>(ring_all_reduce),
           in_place<double>(ring_all_reduce));
    define(module, "recursive_doubling_all_reduce", "P -> R: the sum; for short arrays.",
           in_place<float>(recursive_doubling_all_reduce), in_place<double>(recursive_doubling_all_reduce));
    define(module, "tree_broadcast", "Root's array -> R.", broadcast<float>(), broadcast<double>(),
           "root"_a = 0);
    module.def(
        "piece",
        [](std::size_t n, std::size_t pieces, std::size_t i) {
            return std::pair(cut(n, pieces, i), cut(n, pieces, i + 1));
        },
        "n"_a, "pieces"_a, "i"_a, "[begin, end) of piece i of n elements.");
    module.def("ring_all_reduce_bytes", &ring_all_reduce_bytes, "n"_a, "element"_a, "ranks"_a, "rank"_a);
}

void bind_blas(py::module_ module) {
    module.def("gemm", &product<float>, py::arg("a").noconvert(), py::arg("b").noconvert(),
               "transpose_a"_a = false, "transpose_b"_a = false, "a @ b.");
    module.def("gemm", &product<double>, py::arg("a").noconvert(), py::arg("b").noconvert(),
               "transpose_a"_a = false, "transpose_b"_a = false, "a @ b.");
    module.def("set_threads", &set_blas_threads, "n"_a);
    module.def("threads", &blas_threads, "0 when the BLAS is not OpenBLAS.");
}

void bind_data(py::module_ random, py::module_ text, py::module_ record) {
    random.def("bits", &random_bits, "seed"_a, "stream"_a, "index"_a);
    random.def("uniform", &uniform, "seed"_a, "stream"_a, "index"_a, "In [0, 1).");
    text.def(
        "load",
        [](const std::string& data) {
            const Text loaded = load_text(data);
            const auto bytes = [](const auto& v) { return Array<std::uint8_t>(v.size(), v.data()); };
            return py::make_tuple(bytes(loaded.train), bytes(loaded.validation), loaded.name);
        },
        "data"_a = "", "(train, validation, name)");
    text.def(
        "mlp_samples",
        [](const Array<std::uint8_t>& source, std::uint64_t seed, std::uint64_t step, std::size_t begin,
           std::size_t end, std::size_t context) {
            Array<double> x({end - begin, 8 * context});
            Array<std::uint8_t> y(end - begin);
            const MatrixView<double> view(x.mutable_data(), end - begin, 8 * context);
            mlp_samples<double>(readable(source), seed, step, begin, view, writable(y));
            return py::make_tuple(x, y);
        },
        "text"_a, "seed"_a, "step"_a, "begin"_a, "end"_a, "context"_a, "(x [B, 8 K], y [B])");
    record.def("median", &median, "values"_a);
    record.def("peak_memory_bytes", &peak_memory_bytes, "The largest resident set of this process so far.");
}

}  // namespace

PYBIND11_MODULE(fived, module) {
    module.doc() =
        "MPI, collectives, BLAS and data of the course's C++ part. An mpi4py communicator becomes ours by "
        "fived.mpi.Communicator(comm).";
    py::register_exception<UsageError>(module, "UsageError", PyExc_ValueError);
    bind_mpi(module.def_submodule("mpi"));
    bind_collectives(module.def_submodule("collectives"));
    bind_blas(module.def_submodule("blas"));
    bind_data(module.def_submodule("random"), module.def_submodule("text"), module.def_submodule("record"));
}
