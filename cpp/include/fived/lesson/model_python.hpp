// A model with its optimizers as a Python class, on numpy arrays and an mpi4py communicator.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "fived/lesson/python.hpp"
#include "fived/math/optimizer.hpp"

namespace fived {

/// What Python calls, whatever the type of arithmetic. A chapter's class adds its own.
class PythonModel {
  public:
    virtual ~PythonModel() = default;
    virtual double gradient_norm() = 0;
    virtual void sgd(double rate) = 0;
    virtual void adamw(double rate, std::pair<double, double> betas, double epsilon, double decay) = 0;
    virtual py::dict values(bool gradients) = 0;
    virtual void set_weights(const std::map<std::string, py::array>& weights) = 0;
    virtual std::size_t bytes_sent() const = 0;
};

struct ModelHelp {
    const char *gradient_norm, *weights, *gradients, *set_weights, *bytes_sent;
};

/// Names, with their help, what all models have: `Class` derives from PythonModel.
template <class Class>
py::class_<Class>& define_model(py::class_<Class>& model, const ModelHelp& help) {
    using namespace py::literals;
    using Release = py::call_guard<py::gil_scoped_release>;
    return model.def("gradient_norm", &Class::gradient_norm, Release(), help.gradient_norm)
        .def("sgd", &Class::sgd, "rate"_a, Release())
        .def("adamw", &Class::adamw, "rate"_a = 1e-3, "betas"_a = std::pair(0.9, 0.999), "epsilon"_a = 1e-8,
             "decay"_a = 0.01, Release())
        .def(
            "weights", [](Class& self) { return self.values(false); }, help.weights)
        .def(
            "gradients", [](Class& self) { return self.values(true); }, help.gradients)
        .def("set_weights", &Class::set_weights, "weights"_a, help.set_weights)
        .def_property_readonly("bytes_sent", &Class::bytes_sent, help.bytes_sent);
}

/// `Class` on an M of float or double, made by emplacing model_.
template <class Class, class T, class M>
class BoundModel : public Class {
  public:
    double gradient_norm() override { return model_->gradient_norm(); }
    void sgd(double rate) override {
        sgd_.rate = rate;
        model_->step(sgd_);
    }
    void adamw(double rate, std::pair<double, double> betas, double epsilon, double decay) override {
        adamw_.rate = rate, adamw_.beta1 = betas.first, adamw_.beta2 = betas.second;
        adamw_.epsilon = epsilon, adamw_.decay = decay;
        model_->step(adamw_);
    }
    std::size_t bytes_sent() const override { return model_->bytes_sent(); }

  protected:
    explicit BoundModel(std::optional<Communicator> comm) : comm_(std::move(comm)) {}
    /// null: one rank.
    const Communicator* ranks() const { return comm_ ? &*comm_ : nullptr; }

  private:
    std::optional<Communicator> comm_;  // before model_, which needs it to the end

  protected:
    std::optional<M> model_;
    Sgd sgd_;
    AdamW<T> adamw_;
};

}  // namespace fived
