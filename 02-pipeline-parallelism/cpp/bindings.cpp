// Python module pp_mpi: the MLP in stages, on numpy arrays and an mpi4py communicator.
#include <map>
#include <memory>
#include <optional>

#include "fived/lesson/mlp_python.hpp"
#include "pp_mpi.hpp"

namespace {

using namespace fived;

/// One Python class for both types of arithmetic.
class Model {
  public:
    virtual ~Model() = default;
    virtual double loss_and_gradients(const py::array& x, const Array<std::uint8_t>& y) = 0;
    virtual double gradient_norm() = 0;
    virtual void sgd(double rate) = 0;
    virtual void adamw(double rate, std::pair<double, double> betas, double epsilon, double decay) = 0;
    virtual py::dict values(bool gradients) = 0;
    virtual void set_weights(const std::map<std::string, py::array>& weights) = 0;
    virtual py::list events() const = 0;
    virtual std::size_t bytes_sent() const = 0;
    virtual std::size_t bytes_by_formula(std::size_t batch) const = 0;
    virtual std::size_t buffer_bytes() const = 0;
    virtual double blocked_seconds() const = 0;
};

template <class T>
class ModelOf final : public Model {
  public:
    ModelOf(const std::vector<int>& sizes, Schedule schedule, const py::object& comm, std::uint64_t seed)
        : comm_(communicator(comm)), model_(sizes, seed, comm_, std::move(schedule)) {}
    double loss_and_gradients(const py::array& x, const Array<std::uint8_t>& y) override {
        const Array<T> x_BI = converted<T>(x);
        const MatrixView<const T> view = matrix(x_BI);
        const auto targets = readable(y);
        const py::gil_scoped_release waiting;
        return model_.loss_and_gradients(view, targets);
    }
    double gradient_norm() override { return model_.gradient_norm(); }
    void sgd(double rate) override {
        sgd_.rate = rate;
        model_.step(sgd_);
    }
    void adamw(double rate, std::pair<double, double> betas, double epsilon, double decay) override {
        adamw_.rate = rate, adamw_.beta1 = betas.first, adamw_.beta2 = betas.second;
        adamw_.epsilon = epsilon, adamw_.decay = decay;
        model_.step(adamw_);
    }
    py::dict values(bool gradients) override {
        return named_arrays<T>(model_.parameters(), gradients ? model_.gradients() : model_.weights());
    }
    void set_weights(const std::map<std::string, py::array>& weights) override {
        set_named<T>(model_.parameters(), weights, model_.weights());
    }
    py::list events() const override {
        py::list events;
        for (const Event& e : model_.events())
            events.append(py::make_tuple(e.instruction.text(), e.start, e.end));
        return events;
    }
    std::size_t bytes_sent() const override { return model_.bytes_sent(); }
    std::size_t bytes_by_formula(std::size_t batch) const override { return model_.bytes_by_formula(batch); }
    std::size_t buffer_bytes() const override { return model_.buffer_bytes(); }
    double blocked_seconds() const override { return model_.blocked_seconds(); }

  private:
    Communicator comm_;
    Pipeline<T> model_;
    Sgd sgd_;
    AdamW<T> adamw_;
};

Schedule schedule_of(const std::string& lists) {
    try {
        return read_schedule(lists);
    } catch (const UsageError& error) {
        throw std::invalid_argument(error.what());
    }
}

std::unique_ptr<Model> make(const std::vector<int>& sizes, const std::string& lists, const py::object& comm,
                            const std::string& dtype, std::uint64_t seed) {
    if (dtype == "float64") return std::make_unique<ModelOf<double>>(sizes, schedule_of(lists), comm, seed);
    if (dtype == "float32") return std::make_unique<ModelOf<float>>(sizes, schedule_of(lists), comm, seed);
    throw std::invalid_argument("dtype is " + dtype + "; it is float64 or float32");
}

}  // namespace

PYBIND11_MODULE(pp_mpi, module) {
    using namespace py::literals;
    module.doc() = "Pipeline parallelism by MPI: an MLP whose layers are spread over an mpi4py communicator.";
    module.def(
        "bubble",
        [](const std::string& lists, double forward, double input, double weights) {
            return simulated_bubble(schedule_of(lists), [=](const Instruction& i) {
                const double times[] = {forward, input + weights, input, weights};
                return times[int(i.op)];
            });
        },
        "lists"_a, "forward"_a = 1.0, "input"_a = 1.0, "weights"_a = 1.0,
        "The share of all ranks' time in which they compute nothing, for given times of a computation.");
    py::class_<Model>(module, "MLP", "The MLP of common/models/mlp.py in stages on the ranks of comm.")
        .def(py::init(&make), "sizes"_a, "lists"_a, "comm"_a, "dtype"_a = "float64", "seed"_a = 0,
             "lists: a schedule as text, str(make_schedule(...)) of pp_schedules.py; ValueError for one that "
             "would compute something wrong or hang. Collective.")
        .def("loss_and_gradients", &Model::loss_and_gradients, "x"_a, "y"_a,
             "The loss of a batch x [B, inputs], y [B] uint8, the same on every rank. Collective.")
        .def("gradient_norm", &Model::gradient_norm, py::call_guard<py::gil_scoped_release>(),
             "2-norm of all ranks' gradients. Collective.")
        .def("sgd", &Model::sgd, "rate"_a, py::call_guard<py::gil_scoped_release>())
        .def("adamw", &Model::adamw, "rate"_a = 1e-3, "betas"_a = std::pair(0.9, 0.999), "epsilon"_a = 1e-8,
             "decay"_a = 0.01, py::call_guard<py::gil_scoped_release>())
        .def(
            "weights", [](Model& model) { return model.values(false); },
            "Copies of this rank's, under their names in the whole model.")
        .def(
            "gradients", [](Model& model) { return model.values(true); }, "The same of its gradients.")
        .def("set_weights", &Model::set_weights, "weights"_a, "By name; a rank takes its own.")
        .def("events", &Model::events,
             "What this rank computed last, as (instruction, start, end) in seconds since it began.")
        .def("bytes_by_formula", &Model::bytes_by_formula, "batch"_a)
        .def_property_readonly("bytes_sent", &Model::bytes_sent,
                               "Bytes this rank sent in the last loss_and_gradients.")
        .def_property_readonly("buffer_bytes", &Model::buffer_bytes,
                               "Activations and messages, the most at once.")
        .def_property_readonly("blocked_seconds", &Model::blocked_seconds,
                               "Seconds this rank was blocked in MPI in the last loss_and_gradients.");
}
