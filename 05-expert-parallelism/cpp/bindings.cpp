// Python module ep_mpi: the mixture of experts on numpy arrays and an mpi4py communicator.
#include <map>
#include <memory>
#include <optional>

#include "ep_mpi.hpp"
#include "fived/python.hpp"

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
    virtual void set_weights(const std::map<std::string, py::array>& weights) = 0;
    virtual py::array choices() const = 0;
    virtual py::object experts() const = 0;
    virtual std::size_t bytes_sent() const = 0;
    virtual std::size_t bytes_by_formula(std::size_t sent, std::size_t received) const = 0;
    virtual double communication_seconds() const = 0;
    virtual double permutation_seconds() const = 0;
};

template <class T>
class LayerOf final : public Layer {
  public:
    LayerOf(const MoEShape& shape, const py::object& comm, std::uint64_t seed) {
        if (!comm.is_none()) comm_.emplace(communicator(comm));
        layer_.emplace(shape, seed, comm_ ? &*comm_ : nullptr);
    }
    py::array forward(const py::array& x) override {
        x_ = checked("x", x);
        Array<T> y(shape_of(x_));
        const MatrixView<const T> input = view(readable(x_));
        const MatrixView<T> output = view(writable(y));
        const py::gil_scoped_release waiting;
        layer_->forward(input, output);
        return y;
    }
    py::array backward(const py::array& dy) override {
        const Array<T> slope = checked("dy", dy);
        if (x_.ndim() < 2) throw std::invalid_argument("backward follows forward; there was none");
        Array<T> dx(shape_of(slope));
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
        for (const StackedParameter& p : layer_->parameters())
            named[p.name.c_str()] = py::array_t<T>(p.shape, flat.data() + p.offset);
        return named;
    }
    void set_weights(const std::map<std::string, py::array>& weights) override {
        std::vector<Array<T>> all;
        for (const StackedParameter& p : layer_->parameters()) {
            const auto found = weights.find(p.name);
            if (found == weights.end()) throw std::invalid_argument("no weights for " + p.name);
            const Array<T> values = Array<T>::ensure(found->second);
            std::vector<std::size_t> needed = p.shape;
            needed[0] = layer_->shape().experts;
            if (!values || shape_of(values) != needed)
                throw std::invalid_argument(
                    p.name + " is " + std::string(py::str(found->second.attr("shape"))) + "; needed is " +
                    std::string(py::str(py::tuple(py::cast(needed)))));
            all.push_back(values);
        }
        if (weights.size() != all.size())
            throw std::invalid_argument("the layer has " + std::to_string(all.size()) +
                                        " parameters; given are " + std::to_string(weights.size()));
        for (std::size_t n = 0; n < all.size(); ++n) {
            const StackedParameter& p = layer_->parameters()[n];
            std::copy_n(all[n].data() + p.place, p.size(), layer_->weights().begin() + p.offset);
        }
    }
    py::array choices() const override {
        const std::size_t K = layer_->shape().experts_per_token;
        const auto chosen = layer_->choices();
        return py::array_t<std::uint32_t>({chosen.size() / K, K}, chosen.data());
    }
    py::object experts() const override {
        return py::module_::import("builtins")
            .attr("range")(layer_->experts().begin, layer_->experts().end());
    }
    std::size_t bytes_sent() const override { return layer_->bytes_sent(); }
    std::size_t bytes_by_formula(std::size_t sent, std::size_t received) const override {
        return layer_->bytes_by_formula(sent, received);
    }
    double communication_seconds() const override { return layer_->communication_seconds(); }
    double permutation_seconds() const override { return layer_->permutation_seconds(); }

  private:
    static std::vector<std::size_t> shape_of(const Array<T>& array) {
        return {array.shape(), array.shape() + array.ndim()};
    }
    template <class U>
    MatrixView<U> view(std::span<U> data) const {
        const std::size_t width = layer_->shape().width;
        return {data.data(), data.size() / width, width};
    }
    Array<T> checked(const char* name, const py::array& given) const {
        const std::size_t width = layer_->shape().width;
        if (!py::isinstance<Array<T>>(given) || given.ndim() < 2 ||
            std::size_t(given.shape(given.ndim() - 1)) != width)
            throw std::invalid_argument(std::string(name) + " is " + std::string(py::str(given.dtype())) +
                                        " " + std::string(py::str(given.attr("shape"))) + "; needed is " +
                                        std::string(py::str(py::dtype::of<T>())) + " (tokens, " +
                                        std::to_string(width) + ") in C order");
        return given.cast<Array<T>>();
    }

    std::optional<Communicator> comm_;
    std::optional<ExpertParallelLayer<T>> layer_;
    Array<T> x_;
    Sgd sgd_;
    AdamW<T> adamw_;
};

bool first_of(const char* what, const std::string& given, const std::string& first,
              const std::string& second) {
    if (given != first && given != second)
        throw std::invalid_argument(std::string(what) + " is " + given + "; it is " + first + " or " +
                                    second);
    return given == first;
}

std::unique_ptr<Layer> make(std::size_t width, std::size_t mlp_width, std::size_t experts,
                            std::size_t experts_per_token, const py::object& comm, std::uint64_t seed,
                            const std::string& dtype, const std::string& mlp, const std::string& router) {
    const MoEShape shape{width,
                         mlp_width,
                         experts,
                         experts_per_token,
                         first_of("mlp", mlp, "swiglu", "gelu"),
                         first_of("router", router, "renormalised", "softmax")};
    if (first_of("dtype", dtype, "float64", "float32"))
        return std::make_unique<LayerOf<double>>(shape, comm, seed);
    return std::make_unique<LayerOf<float>>(shape, comm, seed);
}

}  // namespace

PYBIND11_MODULE(ep_mpi, module) {
    using namespace py::literals;
    module.doc() =
        "Expert parallelism by MPI: a mixture of experts, these spread over an mpi4py communicator.";
    py::class_<Layer>(
        module, "Layer",
        "layers.0.mlp of a one-layer common/models/transformer.py with experts, on all ranks of "
        "comm, dropless;\nserial when comm is None.")
        .def(py::init(&make), "width"_a, "mlp_width"_a, "experts"_a, "experts_per_token"_a = 2,
             "comm"_a = py::none(), "seed"_a = 0, "dtype"_a = "float64", "mlp"_a = "swiglu",
             "router"_a = "renormalised",
             "mlp: swiglu without biases, or gelu with them. router: renormalised or softmax. Collective.")
        .def("forward", &Layer::forward, "x"_a,
             "y from this rank's x [T, D] or [B, S, D]; x is kept. Collective.")
        .def("backward", &Layer::backward, "dy"_a,
             "dx of the last forward; sets the gradients, the router's summed. Once. Collective.")
        .def("gradient_norm", &Layer::gradient_norm, py::call_guard<py::gil_scoped_release>(),
             "2-norm of the gradients of the whole layer. Collective.")
        .def("sgd", &Layer::sgd, "rate"_a, py::call_guard<py::gil_scoped_release>())
        .def("adamw", &Layer::adamw, "rate"_a = 1e-3, "betas"_a = std::pair(0.9, 0.999), "epsilon"_a = 1e-8,
             "decay"_a = 0.01, py::call_guard<py::gil_scoped_release>())
        .def(
            "weights", [](Layer& layer) { return layer.values(false); },
            "Copies of the router's and of this rank's experts', by name.")
        .def(
            "gradients", [](Layer& layer) { return layer.values(true); },
            "Copies of the router's and of this rank's experts', by name.")
        .def("set_weights", &Layer::set_weights, "weights"_a,
             "Of all experts, by name; a rank takes its own.")
        .def_property_readonly("experts", &Layer::experts, "This rank's, a range.")
        .def_property_readonly("choices", &Layer::choices,
                               "The experts of each token of the last forward, [T, K].")
        .def_property_readonly("bytes_sent", &Layer::bytes_sent,
                               "Bytes this rank sent since forward was last called.")
        .def("bytes_by_formula", &Layer::bytes_by_formula, "sent"_a, "received"_a,
             "Of a forward and backward with so many rows to and from other ranks.")
        .def_property_readonly("communication_seconds", &Layer::communication_seconds,
                               "Seconds in MPI since forward was last called.")
        .def_property_readonly("permutation_seconds", &Layer::permutation_seconds,
                               "Seconds permuting and combining since forward was last called.");
}
