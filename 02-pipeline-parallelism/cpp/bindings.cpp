// Python module pp_mpi: the MLP in stages, on numpy arrays and an mpi4py communicator.
#include <map>
#include <memory>

#include "fived/lesson/mlp_python.hpp"
#include "fived/lesson/model_python.hpp"
#include "fived/math/dtype.hpp"
#include "pp_mpi.hpp"

namespace {

using namespace fived;

/// One Python class for both types of arithmetic.
class Model : public PythonModel {
  public:
    virtual double loss_and_gradients(const py::array& x, const Array<std::uint8_t>& y) = 0;
    virtual py::list events() const = 0;
    virtual std::size_t bytes_by_formula(std::size_t batch) const = 0;
    virtual std::size_t buffer_bytes() const = 0;
    virtual double blocked_seconds() const = 0;
};

template <class T>
class ModelOf final : public BoundModel<Model, T, Pipeline<T>> {
    using Base = BoundModel<Model, T, Pipeline<T>>;
    using Base::model_;

  public:
    ModelOf(const std::vector<int>& sizes, Schedule schedule, const py::object& comm, std::uint64_t seed)
        : Base(communicator(comm)) {
        model_.emplace(sizes, seed, *this->ranks(), std::move(schedule));
    }
    double loss_and_gradients(const py::array& x, const Array<std::uint8_t>& y) override {
        const Array<T> x_BI = converted<T>(x);
        const MatrixView<const T> view = matrix(x_BI);
        const auto targets = readable(y);
        const py::gil_scoped_release waiting;
        return model_->loss_and_gradients(view, targets);
    }
    py::dict values(bool gradients) override {
        return named_arrays<T>(model_->parameters(), gradients ? model_->gradients() : model_->weights());
    }
    void set_weights(const std::map<std::string, py::array>& weights) override {
        set_named<T>(model_->parameters(), weights, model_->weights());
    }
    py::list events() const override {
        py::list events;
        for (const Event& e : model_->events())
            events.append(py::make_tuple(e.instruction.text(), e.start, e.end));
        return events;
    }
    std::size_t bytes_by_formula(std::size_t batch) const override { return model_->bytes_by_formula(batch); }
    std::size_t buffer_bytes() const override { return model_->buffer_bytes(); }
    double blocked_seconds() const override { return model_->blocked_seconds(); }
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
    return with_type(parse<Dtype>("dtype", dtype), [&]<class T>() -> std::unique_ptr<Model> {
        return std::make_unique<ModelOf<T>>(sizes, schedule_of(lists), comm, seed);
    });
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
    py::class_<Model> model(module, "MLP", "The MLP of common/models/mlp.py in stages on the ranks of comm.");
    model
        .def(py::init(&make), "sizes"_a, "lists"_a, "comm"_a, "dtype"_a = "float64", "seed"_a = 0,
             "lists: a schedule as text, str(make_schedule(...)) of pp_schedules.py; ValueError for one that "
             "would compute something wrong or hang. Collective.")
        .def("loss_and_gradients", &Model::loss_and_gradients, "x"_a, "y"_a,
             "The loss of a batch x [B, inputs], y [B] uint8, the same on every rank. Collective.");
    define_model(model, {.gradient_norm = "2-norm of all ranks' gradients. Collective.",
                         .weights = "Copies of this rank's, under their names in the whole model.",
                         .gradients = "The same of its gradients.",
                         .set_weights = "By name; a rank takes its own.",
                         .bytes_sent = "Bytes this rank sent in the last loss_and_gradients."})
        .def("events", &Model::events,
             "What this rank computed last, as (instruction, start, end) in seconds since it began.")
        .def("bytes_by_formula", &Model::bytes_by_formula, "batch"_a)
        .def_property_readonly("buffer_bytes", &Model::buffer_bytes,
                               "Activations and messages, the most at once.")
        .def_property_readonly("blocked_seconds", &Model::blocked_seconds,
                               "Seconds this rank was blocked in MPI in the last loss_and_gradients.");
}
