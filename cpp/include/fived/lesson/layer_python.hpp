// A layer with its own backward pass as a Python class, on numpy arrays and an mpi4py communicator.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fived/lesson/python.hpp"
#include "fived/math/optimizer.hpp"

namespace fived {

/// What Python calls, whatever the type of arithmetic. A chapter's class adds its own.
class PythonLayer {
  public:
    virtual ~PythonLayer() = default;
    virtual py::array forward(const py::array& x) = 0;
    virtual py::array backward(const py::array& dy) = 0;
    virtual double gradient_norm() = 0;
    virtual void sgd(double rate) = 0;
    virtual void adamw(double rate, std::pair<double, double> betas, double epsilon, double decay) = 0;
    virtual py::dict values(bool gradients) = 0;
    virtual void set_weights(const std::map<std::string, py::array>& weights) = 0;
    virtual std::size_t bytes_sent() const = 0;
    virtual double communication_seconds() const = 0;
};

/// Names, with their help, what all layers have: `Class` derives from PythonLayer.
template <class Class>
py::class_<Class>& define_layer(py::class_<Class>& layer) {
    using namespace py::literals;
    return layer
        .def("backward", &Class::backward, "dy"_a,
             "dx of the last forward; sets the gradients. Once. Collective.")
        .def("gradient_norm", &Class::gradient_norm, py::call_guard<py::gil_scoped_release>(),
             "2-norm of the gradients of the whole layer. Collective.")
        .def("sgd", &Class::sgd, "rate"_a, py::call_guard<py::gil_scoped_release>())
        .def("adamw", &Class::adamw, "rate"_a = 1e-3, "betas"_a = std::pair(0.9, 0.999), "epsilon"_a = 1e-8,
             "decay"_a = 0.01, py::call_guard<py::gil_scoped_release>())
        .def(
            "weights", [](Class& layer) { return layer.values(false); },
            "Copies of this rank's parts, by name.")
        .def(
            "gradients", [](Class& layer) { return layer.values(true); },
            "Copies of this rank's parts, by name.")
        .def("set_weights", &Class::set_weights, "weights"_a,
             "Whole parameters, by name; a rank takes its parts.")
        .def_property_readonly("bytes_sent", &Class::bytes_sent,
                               "Bytes this rank sent since forward was last called.")
        .def_property_readonly("communication_seconds", &Class::communication_seconds,
                               "Seconds in MPI since forward was last called.");
}

/// `Class` on an L of float or double. L's parameters say shape(), whole_shape() and place(i), element i's in the whole.
template <class Class, class T, class L>
class BoundLayer : public Class {
  public:
    py::array forward(const py::array& x) override {
        x_ = checked("x", x);
        Array<T> y(shape_of(x_));
        const MatrixView<const T> input = view(readable(x_));
        const MatrixView<T> output = view(writable(y));
        const py::gil_scoped_release waiting;
        run_forward(input, output);
        return y;
    }
    py::array backward(const py::array& dy) override {
        const Array<T> slope = checked("dy", dy);
        if (x_.ndim() < 2) throw std::invalid_argument("backward follows a forward, once; there was none");
        Array<T> dx(shape_of(slope));
        const MatrixView<const T> input = view(readable(slope));
        const MatrixView<T> output = view(writable(dx));
        {
            const py::gil_scoped_release waiting;
            layer_->backward(input, output);
        }
        x_ = Array<T>();  // once: the layer's buffers are those of this backward now
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
        for (const auto& p : layer_->parameters())
            named[p.name.c_str()] = py::array_t<T>(p.shape(), flat.data() + p.offset);
        return named;
    }
    void set_weights(const std::map<std::string, py::array>& weights) override {
        std::vector<Array<T>> all;
        for (const auto& p : layer_->parameters()) {
            const auto found = weights.find(p.name);
            if (found == weights.end()) throw std::invalid_argument("no weights for " + p.name);
            const Array<T> values = Array<T>::ensure(found->second);
            if (!values || shape_of(values) != p.whole_shape())
                throw std::invalid_argument(p.name + " is " + text(found->second.attr("shape")) +
                                            "; needed is " + text(py::tuple(py::cast(p.whole_shape()))));
            all.push_back(values);
        }
        if (weights.size() != all.size())
            throw std::invalid_argument("the layer has " + std::to_string(all.size()) +
                                        " parameters; given are " + std::to_string(weights.size()));
        for (std::size_t n = 0; n < all.size(); ++n) {
            const auto& p = layer_->parameters()[n];
            for (std::size_t i = 0; i < p.size(); ++i)
                layer_->weights()[p.offset + i] = all[n].data()[p.place(i)];
        }
    }
    std::size_t bytes_sent() const override { return layer_->bytes_sent(); }
    double communication_seconds() const override { return layer_->communication_seconds(); }

  protected:
    explicit BoundLayer(const py::object& comm) {
        if (!comm.is_none()) comm_.emplace(communicator(comm));
    }
    const Communicator* ranks() const { return comm_ ? &*comm_ : nullptr; }
    virtual void run_forward(MatrixView<const T> x, MatrixView<T> y) = 0;
    /// Whether x may have so many dimensions, and what those before the width are called.
    virtual bool takes(py::ssize_t dimensions) const = 0;
    virtual std::string leading() const = 0;

  private:
    std::optional<Communicator> comm_;  // before layer_, which needs it to the end

  protected:
    std::optional<L> layer_;
    Array<T> x_;

  private:
    static std::string text(const py::handle& object) { return py::str(object); }
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
        if (!py::isinstance<Array<T>>(given) || given.ndim() < 2 || !takes(given.ndim()) ||
            std::size_t(given.shape(given.ndim() - 1)) != width)
            throw std::invalid_argument(std::string(name) + " is " + text(given.dtype()) + " " +
                                        text(given.attr("shape")) + "; needed is " +
                                        text(py::dtype::of<T>()) + " (" + leading() + ", " +
                                        std::to_string(width) + ") in C order");
        return given.cast<Array<T>>();
    }

    Sgd sgd_;
    AdamW<T> adamw_;
};

/// Whether `given` is the first of the two words that it may be.
inline bool is_first(const std::string& what, const std::string& given, const std::string& first,
                     const std::string& second) {
    if (given != first && given != second)
        throw std::invalid_argument(what + " is " + given + "; it is " + first + " or " + second);
    return given == first;
}

}  // namespace fived
