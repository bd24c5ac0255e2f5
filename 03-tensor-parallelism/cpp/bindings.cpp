// Python module tp_mpi: the tensor-parallel Transformer layer on numpy arrays and an mpi4py communicator.
#include <memory>

#include "fived/lesson/layer_python.hpp"
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
    LayerOf(const LayerShape& shape, const py::object& comm, std::uint64_t seed, bool ring)
        : BoundLayer<Layer, T, TensorParallelLayer<T>>(comm) {
        this->layer_.emplace(shape, seed, this->ranks(), ring);
    }
    py::dict places() const override {
        py::dict named;
        for (const Shard& p : this->layer_->parameters()) {
            const py::slice rows(p.first_row, p.first_row + p.rows, 1),
                columns(p.first_column, p.first_column + p.columns, 1);
            named[p.name.c_str()] =
                p.is_vector() ? py::tuple(py::make_tuple(rows)) : py::make_tuple(rows, columns);
        }
        return named;
    }
    std::size_t bytes_by_formula(std::size_t tokens) const override {
        return this->layer_->bytes_by_formula(tokens);
    }

  private:
    void run_forward(MatrixView<const T> x, MatrixView<T> y) override {
        this->layer_->forward(x, std::size_t(this->x_.shape(1)), y);
    }
    bool takes(py::ssize_t dimensions) const override { return dimensions == 3; }
    std::string leading() const override { return "samples, sequence"; }
};

std::unique_ptr<Layer> make(std::size_t width, std::size_t heads, std::size_t mlp_width,
                            const py::object& comm, std::uint64_t seed, const std::string& dtype,
                            const std::string& reduction, double epsilon) {
    const LayerShape shape{width, heads, mlp_width, epsilon};
    const bool ring = !is_first("reduction", reduction, "mpi", "ring");
    if (is_first("dtype", dtype, "float64", "float32"))
        return std::make_unique<LayerOf<double>>(shape, comm, seed, ring);
    return std::make_unique<LayerOf<float>>(shape, comm, seed, ring);
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
