// Python module dp_mpi: the data-parallel MLP on numpy arrays and an mpi4py communicator.
#include <map>
#include <memory>

#include "dp_mpi.hpp"
#include "fived/lesson/mlp_python.hpp"
#include "fived/lesson/model_python.hpp"
#include "fived/math/dtype.hpp"

namespace {

using namespace fived;

/// One Python class for both types of arithmetic.
class Model : public PythonModel {
  public:
    virtual double loss_and_gradients(const py::array& x, const Array<std::uint8_t>& y,
                                      std::size_t global_count, std::size_t micro_batches) = 0;
    virtual double exposed_seconds() const = 0;
    virtual std::size_t state_bytes() const = 0;
};

template <class T>
class ModelOf final : public BoundModel<Model, T, DataParallelMlp<T>> {
    using Base = BoundModel<Model, T, DataParallelMlp<T>>;
    using Base::model_;

  public:
    ModelOf(const std::vector<int>& sizes, const py::object& comm, std::uint64_t seed, const Strategy& how)
        : Base(communicator_or_none(comm)) {
        const py::gil_scoped_release waiting;
        model_.emplace(sizes, seed, this->ranks(), how);
    }
    double loss_and_gradients(const py::array& x, const Array<std::uint8_t>& y, std::size_t global_count,
                              std::size_t micro_batches) override {
        if (global_count < 1 || micro_batches < 1)
            throw std::invalid_argument("global_count is " + std::to_string(global_count) +
                                        ", micro_batches " + std::to_string(micro_batches) +
                                        "; each must be at least 1");
        const Array<T> x_BI = converted<T>(x);
        const MatrixView<const T> view = matrix(x_BI);
        const auto targets = readable(y);
        const py::gil_scoped_release waiting;
        return model_->loss_and_gradients(view, targets, global_count, micro_batches);
    }
    py::dict values(bool gradients) override {
        return named_arrays<T>(model_->mlp().parameters(),
                               gradients ? all_gradients() : model_->mlp().weights());
    }
    void set_weights(const std::map<std::string, py::array>& weights) override {
        const auto parameters = model_->mlp().parameters();
        for (const auto& [name, values] : weights)
            if (std::ranges::find(parameters, name, &Parameter::name) == parameters.end())
                throw std::invalid_argument("the model has no parameter " + name);
        set_named<T>(parameters, weights, model_->mlp().weights());
    }
    double exposed_seconds() const override { return model_->exposed_seconds(); }
    std::size_t state_bytes() const override { return this->adamw_.state_bytes(); }

  private:
    std::span<T> all_gradients() {
        const py::gil_scoped_release waiting;
        return model_->gather_gradients();
    }
};

std::unique_ptr<Model> make(const std::vector<int>& sizes, const std::string& dtype, const py::object& comm,
                            std::uint64_t seed, double bucket_mb, const std::string& reduction, int zero,
                            std::optional<double> compress_keep, bool feedback) {
    const auto type = parse<Dtype>("dtype", dtype);
    const auto how_summed = parse<Reduction>("reduction", reduction);
    if (zero != 0 && zero != 1)
        throw std::invalid_argument("zero is " + std::to_string(zero) + "; it is 0 or 1");
    if (comm.is_none() && (zero || compress_keep))
        throw std::invalid_argument("zero and compress_keep need a comm: there is nobody to share with");
    const Strategy how{.zero = zero == 1,
                       .keep = compress_keep,
                       .feedback = feedback,
                       .reduction = how_summed,
                       .bucket_bytes = std::size_t(bucket_mb * (1 << 20))};
    return with_type(type, [&]<class T>() -> std::unique_ptr<Model> {
        return std::make_unique<ModelOf<T>>(sizes, comm, seed, how);
    });
}

}  // namespace

PYBIND11_MODULE(dp_mpi, module) {
    using namespace py::literals;
    module.doc() = "Data parallelism by MPI: an MLP whose gradients are summed over an mpi4py communicator.";
    py::class_<Model> model(
        module, "MLP", "The MLP of common/models/mlp.py on every rank of comm; serial when comm is None.");
    model
        .def(py::init(&make), "sizes"_a, "dtype"_a = "float64", "comm"_a = py::none(), "seed"_a = 0,
             "bucket_mb"_a = 1.0, "reduction"_a = "overlapped", "zero"_a = 0, "compress_keep"_a = py::none(),
             "feedback"_a = true,
             "bucket_mb: MiB of gradients that travel together. reduction: overlapped, by MPI, or ring, our "
             "own. zero = 1: a rank updates its piece of the weights alone. compress_keep: the share of its "
             "gradients that a rank sends, in (0, 1]; what it does not send it adds to the next ones "
             "(feedback).")
        .def("loss_and_gradients", &Model::loss_and_gradients, "x"_a, "y"_a, "global_count"_a,
             "micro_batches"_a = 1,
             "This rank's samples x [B, inputs], y [B] uint8 of a global batch of global_count. Returns its "
             "loss.");
    define_model(
        model, {.gradient_norm = "2-norm of all gradients of the global batch. Collective with zero = 1.",
                .weights = "Copies by name, layers.0.weight [O, I] ...",
                .gradients =
                    "Copies by name. Collective with zero = 1, where a rank has the sums of its piece alone.",
                .set_weights = "All of them, by name, on every rank.",
                .bytes_sent = "Bytes this rank sent since loss_and_gradients was last called."})
        .def_property_readonly("exposed_seconds", &Model::exposed_seconds,
                               "Seconds in MPI since loss_and_gradients was last called.")
        .def_property_readonly("state_bytes", &Model::state_bytes, "AdamW's state on this rank.");
}
