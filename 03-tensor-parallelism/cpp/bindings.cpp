// Python module tp_mpi: the tensor-parallel Transformer layer on numpy arrays and an mpi4py communicator.
#include <map>
#include <memory>
#include <optional>

#include "fived/python.hpp"
#include "tp_mpi.hpp"

namespace {

using namespace fived;

/// One Python class for both types of arithmetic.
class Layer {
  public:
    virtual ~Layer() = default;
    virtual py::array forward(const py::array& x) = 0;
    virtual py::array backward(const py::array& dy) = 0;
    virtual double gradient_norm() = 0;
    virtual void sgd(double rate) = 0;
    virtual void adamw(double rate, std::pair<double, double> betas, double epsilon, double decay) = 0;
    virtual py::dict values(bool gradients) = 0;
    virtual py::dict places() const = 0;
    virtual void set_weights(const std::map<std::string, py::array>& weights) = 0;
    virtual std::size_t bytes_sent() const = 0;
    virtual std::size_t bytes_by_formula(std::size_t tokens) const = 0;
    virtual double communication_seconds() const = 0;
};

template <class T>
class LayerOf final : public Layer {
  public:
    LayerOf(const LayerShape& shape, const py::object& comm, std::uint64_t seed, bool ring) {
        if (!comm.is_none()) comm_.emplace(communicator(comm));
        layer_.emplace(shape, seed, comm_ ? &*comm_ : nullptr, ring);
    }
    py::array forward(const py::array& x) override {
        x_ = checked("x", x);
        Array<T> y({x_.shape(0), x_.shape(1), x_.shape(2)});
        const MatrixView<const T> input = view(readable(x_));
        const MatrixView<T> output = view(writable(y));
        const std::size_t sequence = x_.shape(1);
        const py::gil_scoped_release waiting;
        layer_->forward(input, sequence, output);
        return y;
    }
    py::array backward(const py::array& dy) override {
        const Array<T> slope = checked("dy", dy);
        if (x_.ndim() != 3) throw std::invalid_argument("backward follows forward; there was none");
        Array<T> dx({slope.shape(0), slope.shape(1), slope.shape(2)});
        const MatrixView<const T> input = view(readable(slope));
        const MatrixView<T> output = view(writable(dx));
        const py::gil_scoped_release waiting;
        layer_->backward(input, output);
        return dx;
    }
    double gradient_norm() override { return layer_->gradient_norm(); }
    void sgd(double rate) override {
        sgd_.rate = rate;
        layer_->step(sgd_);
    }
    void adamw(double rate, std::pair<double, double> betas, double epsilon, double decay) override {
        adamw_.rate = rate, adamw_.beta1 = betas.first, adamw_.beta2 = betas.second;
        adamw_.epsilon = epsilon, adamw_.decay = decay;
        layer_->step(adamw_);
    }
    py::dict values(bool gradients) override {
        const std::span<T> flat = gradients ? layer_->gradients() : layer_->weights();
        py::dict named;
        for (const Shard& p : layer_->parameters()) {
            py::array_t<T> copy(p.size(), flat.data() + p.offset);
            named[p.name.c_str()] = p.is_vector() ? copy : py::array_t<T>(copy.reshape({p.rows, p.columns}));
        }
        return named;
    }
    py::dict places() const override {
        py::dict named;
        for (const Shard& p : layer_->parameters()) {
            const py::slice rows(p.first_row, p.first_row + p.rows, 1),
                columns(p.first_column, p.first_column + p.columns, 1);
            named[p.name.c_str()] =
                p.is_vector() ? py::tuple(py::make_tuple(rows)) : py::make_tuple(rows, columns);
        }
        return named;
    }
    void set_weights(const std::map<std::string, py::array>& weights) override {
        std::vector<Array<T>> all;
        for (const Shard& p : layer_->parameters()) {
            const auto found = weights.find(p.name);
            if (found == weights.end()) throw std::invalid_argument("no weights for " + p.name);
            const Array<T> values = Array<T>::ensure(found->second);
            const bool fits = values && values.ndim() == (p.is_vector() ? 1 : 2) &&
                              std::size_t(values.shape(0)) == p.whole_rows &&
                              std::size_t(values.size()) == p.whole_rows * p.whole_columns;
            if (!fits)
                throw std::invalid_argument(p.name + " is " + std::to_string(p.whole_rows) + " x " +
                                            std::to_string(p.whole_columns) + "; given is another shape");
            all.push_back(values);
        }
        if (weights.size() != all.size())
            throw std::invalid_argument("the layer has " + std::to_string(all.size()) +
                                        " parameters; given are " + std::to_string(weights.size()));
        for (std::size_t n = 0; n < all.size(); ++n) {
            const Shard& p = layer_->parameters()[n];
            for (std::size_t i = 0; i < p.size(); ++i)
                layer_->weights()[p.offset + i] = all[n].data()[p.place(i)];
        }
    }
    std::size_t bytes_sent() const override { return layer_->bytes_sent(); }
    std::size_t bytes_by_formula(std::size_t tokens) const override {
        return layer_->bytes_by_formula(tokens);
    }
    double communication_seconds() const override { return layer_->communication_seconds(); }

  private:
    template <class U>
    MatrixView<U> view(std::span<U> data) const {
        const std::size_t width = layer_->shape().width;
        return {data.data(), data.size() / width, width};
    }
    Array<T> checked(const char* name, const py::array& given) const {
        const std::size_t width = layer_->shape().width;
        if (!py::isinstance<Array<T>>(given) || given.ndim() != 3 || std::size_t(given.shape(2)) != width)
            throw std::invalid_argument(std::string(name) + " is " + std::string(py::str(given.dtype())) +
                                        " " + std::string(py::str(given.attr("shape"))) + "; needed is " +
                                        std::string(py::str(py::dtype::of<T>())) + " (samples, sequence, " +
                                        std::to_string(width) + ") in C order");
        return given.cast<Array<T>>();
    }

    std::optional<Communicator> comm_;
    std::optional<TensorParallelLayer<T>> layer_;
    Array<T> x_;
    Sgd sgd_;
    AdamW<T> adamw_;
};

std::unique_ptr<Layer> make(std::size_t width, std::size_t heads, std::size_t mlp_width,
                            const py::object& comm, std::uint64_t seed, const std::string& dtype,
                            const std::string& reduction, double epsilon) {
    if (reduction != "mpi" && reduction != "ring")
        throw std::invalid_argument("reduction is " + reduction + "; it is mpi or ring");
    const LayerShape shape{width, heads, mlp_width, epsilon};
    const bool ring = reduction == "ring";
    if (dtype == "float64") return std::make_unique<LayerOf<double>>(shape, comm, seed, ring);
    if (dtype == "float32") return std::make_unique<LayerOf<float>>(shape, comm, seed, ring);
    throw std::invalid_argument("dtype is " + dtype + "; it is float64 or float32");
}

}  // namespace

PYBIND11_MODULE(tp_mpi, module) {
    using namespace py::literals;
    module.doc() =
        "Tensor parallelism by MPI: a Transformer layer whose matrices are split over an mpi4py "
        "communicator.";
    py::class_<Layer>(
        module, "Layer",
        "layers.0 of a one-layer common/models/transformer.py (GPT-2's, causal) on all ranks of comm;\n"
        "serial when comm is None.")
        .def(py::init(&make), "width"_a, "heads"_a, "mlp_width"_a, "comm"_a = py::none(), "seed"_a = 0,
             "dtype"_a = "float64", "reduction"_a = "mpi", "epsilon"_a = 1e-5,
             "reduction: mpi, or ring, our own. Collective.")
        .def("forward", &Layer::forward, "x"_a,
             "y from x [B, S, D], the same on every rank; x is kept. Collective.")
        .def("backward", &Layer::backward, "dy"_a,
             "dx of the last forward; sets the gradients. Once. Collective.")
        .def("gradient_norm", &Layer::gradient_norm, py::call_guard<py::gil_scoped_release>(),
             "2-norm of the gradients of the whole layer. Collective.")
        .def("sgd", &Layer::sgd, "rate"_a, py::call_guard<py::gil_scoped_release>())
        .def("adamw", &Layer::adamw, "rate"_a = 1e-3, "betas"_a = std::pair(0.9, 0.999), "epsilon"_a = 1e-8,
             "decay"_a = 0.01, py::call_guard<py::gil_scoped_release>())
        .def(
            "weights", [](Layer& layer) { return layer.values(false); },
            "Copies of this rank's parts, by name.")
        .def(
            "gradients", [](Layer& layer) { return layer.values(true); },
            "Copies of this rank's parts, by name.")
        .def("places", &Layer::places, "By name, the slices of the whole parameter that this rank holds.")
        .def("set_weights", &Layer::set_weights, "weights"_a,
             "Whole parameters, by name; a rank takes its parts.")
        .def_property_readonly("bytes_sent", &Layer::bytes_sent,
                               "Bytes this rank sent since forward was last called.")
        .def("bytes_by_formula", &Layer::bytes_by_formula, "tokens"_a, "Of a forward and backward.")
        .def_property_readonly("communication_seconds", &Layer::communication_seconds,
                               "Seconds in the all-reduces since forward was last called.");
}
