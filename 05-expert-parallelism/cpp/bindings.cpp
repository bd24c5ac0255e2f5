// Python module ep_mpi: the mixture of experts on numpy arrays and an mpi4py communicator.
#include <memory>

#include "ep_mpi.hpp"
#include "fived/lesson/layer_python.hpp"
#include "fived/math/dtype.hpp"

namespace {

using namespace fived;

class Layer : public PythonLayer {
  public:
    virtual py::array choices() const = 0;
    virtual py::object experts() const = 0;
    virtual std::size_t bytes_by_formula(std::size_t sent, std::size_t received) const = 0;
    virtual double permutation_seconds() const = 0;
};

template <class T>
class LayerOf final : public BoundLayer<Layer, T, ExpertParallelLayer<T>> {
  public:
    LayerOf(const MoEShape& shape, const py::object& comm, std::uint64_t seed)
        : BoundLayer<Layer, T, ExpertParallelLayer<T>>(communicator_or_none(comm)) {
        this->model_.emplace(shape, seed, this->ranks());
    }
    py::array choices() const override {
        const std::size_t K = this->model_->shape().experts_per_token;
        const auto chosen = this->model_->choices();
        return py::array_t<std::uint32_t>({chosen.size() / K, K}, chosen.data());
    }
    py::object experts() const override {
        const Range mine = this->model_->experts();
        return py::module_::import("builtins").attr("range")(mine.begin, mine.end());
    }
    std::size_t bytes_by_formula(std::size_t sent, std::size_t received) const override {
        return this->model_->bytes_by_formula(sent, received);
    }
    double permutation_seconds() const override { return this->model_->permutation_seconds(); }

  private:
    void run_forward(MatrixView<const T> x, MatrixView<T> y) override { this->model_->forward(x, y); }
    bool takes(py::ssize_t) const override { return true; }
    std::string leading() const override { return "tokens"; }
};

std::unique_ptr<Layer> make(std::size_t width, std::size_t mlp_width, std::size_t experts,
                            std::size_t experts_per_token, const py::object& comm, std::uint64_t seed,
                            const std::string& dtype, const std::string& mlp, const std::string& router) {
    const MoEShape shape{width,
                         mlp_width,
                         experts,
                         experts_per_token,
                         parse<Activation>("mlp", mlp),
                         parse<Weights>("router", router)};
    return with_type(parse<Dtype>("dtype", dtype), [&]<class T>() -> std::unique_ptr<Layer> {
        return std::make_unique<LayerOf<T>>(shape, comm, seed);
    });
}

}  // namespace

PYBIND11_MODULE(ep_mpi, module) {
    using namespace py::literals;
    module.doc() =
        "Expert parallelism by MPI: a mixture of experts, these spread over an mpi4py communicator.";
    py::class_<Layer> layer(
        module, "Layer",
        "layers.0.mlp of a one-layer common/models/transformer.py with experts, on all ranks of "
        "comm, dropless;\nserial when comm is None.");
    layer
        .def(py::init(&make), "width"_a, "mlp_width"_a, "experts"_a, "experts_per_token"_a = 2,
             "comm"_a = py::none(), "seed"_a = 0, "dtype"_a = "float64", "mlp"_a = "swiglu",
             "router"_a = "renormalised",
             "mlp: swiglu without biases, or gelu with them. router: renormalised or softmax. Collective.")
        .def("forward", &Layer::forward, "x"_a,
             "y from this rank's x [T, D] or [B, S, D]; x is kept. Collective.");
    define_layer(layer)
        .def_property_readonly("experts", &Layer::experts, "This rank's, a range.")
        .def_property_readonly("choices", &Layer::choices,
                               "The experts of each token of the last forward, [T, K].")
        .def("bytes_by_formula", &Layer::bytes_by_formula, "sent"_a, "received"_a,
             "Of a forward and backward with so many rows to and from other ranks.")
        .def_property_readonly("permutation_seconds", &Layer::permutation_seconds,
                               "Seconds permuting and combining since forward was last called.");
}
