// A layer with its own backward pass as a Python class, on numpy arrays and an mpi4py communicator.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "fived/lesson/model_python.hpp"

namespace fived {

/// A chapter's class adds its own.
class PythonLayer : public PythonModel {
  public:
    virtual py::array forward(const py::array& x) = 0;
    virtual py::array backward(const py::array& dy) = 0;
    virtual double communication_seconds() const = 0;
};

/// Names, with their help, what all layers have: `Class` derives from PythonLayer.
template <class Class>
py::class_<Class>& define_layer(py::class_<Class>& layer) {
    using namespace py::literals;
    layer.def("backward", &Class::backward, "dy"_a,
              "dx of the last forward; sets the gradients. Once. Collective.");
    return define_model(layer, {.gradient_norm = "2-norm of the gradients of the whole layer. Collective.",
                                .weights = "Copies of this rank's parts, by name.",
                                .gradients = "Copies of this rank's parts, by name.",
                                .set_weights = "Whole parameters, by name; a rank takes its parts.",
                                .bytes_sent = "Bytes this rank sent since forward was last called."})
        .def_property_readonly("communication_seconds", &Class::communication_seconds,
                               "Seconds in MPI since forward was last called.");
}

/// `Class` on an L of float or double. L's parameters say shape(), whole_shape() and place(i), element i's in the whole.
template <class Class, class T, class L>
class BoundLayer : public BoundModel<Class, T, L> {
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
            model_->backward(input, output);
        }
        x_ = Array<T>();  // once: the layer's buffers are those of this backward now
        return dx;
    }
    py::dict values(bool gradients) override {
        const std::span<T> flat = gradients ? model_->gradients() : model_->weights();
        py::dict named;
        for (const auto& p : model_->parameters())
            named[p.name.c_str()] = py::array_t<T>(p.shape(), flat.data() + p.offset);
        return named;
    }
    void set_weights(const std::map<std::string, py::array>& weights) override {
        std::vector<Array<T>> all;
        for (const auto& p : model_->parameters()) {
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
            const auto& p = model_->parameters()[n];
            for (std::size_t i = 0; i < p.size(); ++i)
                model_->weights()[p.offset + i] = all[n].data()[p.place(i)];
        }
    }
    double communication_seconds() const override { return model_->communication_seconds(); }

  protected:
    using BoundModel<Class, T, L>::BoundModel, BoundModel<Class, T, L>::model_;
    virtual void run_forward(MatrixView<const T> x, MatrixView<T> y) = 0;
    /// Whether x may have so many dimensions, and what those before the width are called.
    virtual bool takes(py::ssize_t dimensions) const = 0;
    virtual std::string leading() const = 0;

    Array<T> x_;

  private:
    static std::string text(const py::handle& object) { return py::str(object); }
    static std::vector<std::size_t> shape_of(const Array<T>& array) {
        return {array.shape(), array.shape() + array.ndim()};
    }
    template <class U>
    MatrixView<U> view(std::span<U> data) const {
        const std::size_t width = model_->shape().width;
        return {data.data(), data.size() / width, width};
    }
    Array<T> checked(const char* name, const py::array& given) const {
        const std::size_t width = model_->shape().width;
        if (!py::isinstance<Array<T>>(given) || given.ndim() < 2 || !takes(given.ndim()) ||
            std::size_t(given.shape(given.ndim() - 1)) != width)
            throw std::invalid_argument(std::string(name) + " is " + text(given.dtype()) + " " +
                                        text(given.attr("shape")) + "; needed is " +
                                        text(py::dtype::of<T>()) + " (" + leading() + ", " +
                                        std::to_string(width) + ") in C order");
        return given.cast<Array<T>>();
    }
};

}  // namespace fived
