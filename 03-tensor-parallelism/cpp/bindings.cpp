// Python module tp_mpi: the tensor-parallel Transformer layer on numpy arrays and an mpi4py communicator.
#include <memory>

#include "fived/lesson/layer_python.hpp"
#include "fived/math/dtype.hpp"
#include "tp_mpi.hpp"

namespace {

using namespace fived;

class Layer : public PythonLayer {
  public:
    virtual py::dict places() const = 0;
    virtual std::size_t bytes_by_formula(std::size_t tokens) const = 0;
};

template <class T>
class LayerOf final : public BoundLayer<Layer, T, TensorParallelLayer<T>> {
  public:
    LayerOf(const LayerShape& shape, const py::object& comm, std::uint64_t seed, Reduction reduction)
        : BoundLayer<Layer, T, TensorParallelLayer<T>>(communicator_or_none(comm)) {
        this->model_.emplace(shape, seed, this->ranks(), reduction);
    }
    py::dict places() const override {
        py::dict named;
        for (const Shard& p : this->model_->parameters()) {
            const py::slice rows(p.first_row, p.first_row + p.rows, 1),
                columns(p.first_column, p.first_column + p.columns, 1);
            named[p.name.c_str()] =
                p.is_vector() ? py::tuple(py::make_tuple(rows)) : py::make_tuple(rows, columns);
        }
        return named;
    }
    std::size_t bytes_by_formula(std::size_t tokens) const override {
        return this->model_->bytes_by_formula(tokens);
    }

  private:
    void run_forward(MatrixView<const T> x, MatrixView<T> y) override {
        this->model_->forward(x, std::size_t(this->x_.shape(1)), y);
    }
    bool takes(py::ssize_t dimensions) const override { return dimensions == 3; }
    std::string leading() const override { return "samples, sequence"; }
};

std::unique_ptr<Layer> make(std::size_t width, std::size_t heads, std::size_t mlp_width,
                            const py::object& comm, std::uint64_t seed, const std::string& dtype,
                            const std::string& reduction, double epsilon) {
    const LayerShape shape{width, heads, mlp_width, epsilon};
    const auto how = parse<Reduction>("reduction", reduction);
    return with_type(parse<Dtype>("dtype", dtype), [&]<class T>() -> std::unique_ptr<Layer> {
        return std::make_unique<LayerOf<T>>(shape, comm, seed, how);
    });
}

}  // namespace

PYBIND11_MODULE(tp_mpi, module) {
    using namespace py::literals;
    module.doc() =
        "Tensor parallelism by MPI: a Transformer layer whose matrices are split over an mpi4py "
        "communicator.";
    py::class_<Layer> layer(
        module, "Layer",
        "layers.0 of a one-layer common/models/transformer.py (GPT-2's, causal) on all ranks of comm;\n"
        "serial when comm is None.");
    layer
        .def(py::init(&make), "width"_a, "heads"_a, "mlp_width"_a, "comm"_a = py::none(), "seed"_a = 0,
             "dtype"_a = "float64", "reduction"_a = "mpi", "epsilon"_a = 1e-5,
             "reduction: mpi, or ring, our own. Collective.")
        .def("forward", &Layer::forward, "x"_a,
             "y from x [B, S, D], the same on every rank; x is kept. Collective.");
    define_layer(layer)
        .def("places", &Layer::places, "By name, the slices of the whole parameter that this rank holds.")
        .def("bytes_by_formula", &Layer::bytes_by_formula, "tokens"_a, "Of a forward and backward.");
}
