// Python module hybrid_mpi: GPT-2 on a mesh, on numpy arrays and an mpi4py communicator.
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "fived/lesson/python.hpp"
#include "fived/math/dtype.hpp"
#include "fived/math/optimizer.hpp"
#include "hybrid_bytes.hpp"
#include "hybrid_mpi.hpp"

namespace {

using namespace fived;

/// One Python class for both types of arithmetic.
class Model {
  public:
    virtual ~Model() = default;
    virtual double loss_and_gradients(const Array<std::int64_t>& tokens,
                                      const Array<std::int64_t>& targets) = 0;
    virtual double gradient_norm() = 0;
    virtual void sgd(double rate) = 0;
    virtual void adamw(double rate, std::pair<double, double> betas, double epsilon, double decay) = 0;
    virtual py::dict values(bool gradients) = 0;
    virtual py::dict places() const = 0;
    virtual py::dict bytes_sent() const = 0;
    virtual std::map<std::string, double> seconds() const = 0;
    virtual py::dict bytes_by_formula() const = 0;
    virtual std::optional<std::int64_t> rows_moved() const = 0;
};

/// Per rank, by the name of the line.
py::dict per_rank(const Bytes& bytes, const Mesh& mesh) {
    py::dict named;
    for (const auto& [axes, line] : mesh.lines())
        if (const auto found = bytes.find(axes.name()); found != bytes.end())
            named[py::str(axes.name())] = double(found->second) / line->size();
    return named;
}

template <class T>
class ModelOf final : public Model {
  public:
    ModelOf(const ModelShape& shape, const py::object& comm, const MeshShape& mesh, Schedule schedule,
            std::size_t sequence, Order order, std::uint64_t seed)
        : comm_(communicator(comm)) {
        const py::gil_scoped_release waiting;
        mesh_.emplace(comm_, mesh);
        model_.emplace(shape, *mesh_, std::move(schedule), sequence, order, seed);
    }
    double loss_and_gradients(const Array<std::int64_t>& tokens,
                              const Array<std::int64_t>& targets) override {
        const MatrixView<const std::int64_t> tokens_BS = matrix(tokens), targets_BS = matrix(targets);
        const py::gil_scoped_release waiting;
        tokens_ = tokens_BS.rows * tokens_BS.columns / std::size_t(mesh_->size(Axis::sp));
        mesh_->forget();
        const double loss = model_->loss_and_gradients(tokens_BS, targets_BS);
        sent_ = mesh_->sent();
        for (const auto& [axes, line] : mesh_->lines()) seconds_[axes.name()] = line->seconds();
        return loss;
    }
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
    py::dict values(bool gradients) override {
        const std::span<T> flat = gradients ? model_->gradients() : model_->weights();
        py::dict named;
        for (const Placed& p : model_->parameters())
            named[p.name.c_str()] = py::array_t<T>(p.shape, flat.data() + p.offset);
        return named;
    }
    py::dict places() const override {
        py::dict named;
        for (const Placed& p : model_->parameters())
            named[p.name.c_str()] = py::make_tuple(p.whole_shape, p.begin);
        return named;
    }
    py::dict bytes_sent() const override { return per_rank(sent_, *mesh_); }
    std::map<std::string, double> seconds() const override { return seconds_; }
    py::dict bytes_by_formula() const override {
        return per_rank(fived::bytes_by_formula(*model_, std::int64_t(tokens_)), *mesh_);
    }
    std::optional<std::int64_t> rows_moved() const override { return model_->rows_moved(); }

  private:
    Communicator comm_;  // before the mesh, and this before the model, which need it to the end
    std::optional<Mesh> mesh_;
    std::optional<Hybrid<T>> model_;
    Sgd sgd_;
    AdamW<T> adamw_;
    Bytes sent_;
    std::map<std::string, double> seconds_;
    std::size_t tokens_ = 0;
};

std::unique_ptr<Model> make(std::size_t layers, std::size_t width, std::size_t heads, std::size_t longest,
                            const py::object& comm, const std::array<int, 5>& mesh, const std::string& lists,
                            std::size_t sequence, const std::string& order, const std::string& dtype,
                            std::uint64_t seed, std::size_t experts, std::size_t experts_per_token,
                            const std::string& router) {
    const ModelShape shape{
        layers, width, heads, longest, experts, experts_per_token, parse<Weights>("router", router)};
    const MeshShape axes{mesh[0], mesh[1], mesh[2], mesh[3], mesh[4]};
    const auto positions = parse<Order>("order", order);
    try {
        return with_type(parse<Dtype>("dtype", dtype), [&]<class T>() -> std::unique_ptr<Model> {
            return std::make_unique<ModelOf<T>>(shape, comm, axes, read_schedule(lists), sequence, positions,
                                                seed);
        });
    } catch (const UsageError& error) {
        throw std::invalid_argument(error.what());
    }
}

}  // namespace

PYBIND11_MODULE(hybrid_mpi, module) {
    using namespace py::literals;
    using Release = py::call_guard<py::gil_scoped_release>;
    module.doc() =
        "GPT-2, with experts or without, trained by MPI on a mesh of pp x dp x ep x sp x tp ranks of an "
        "mpi4py communicator.";
    py::class_<Model>(module, "GPT2", "GPT-2 of common/models/transformer.py, in parts on the ranks of comm.")
        .def(py::init(&make), "layers"_a, "width"_a, "heads"_a, "longest"_a, "comm"_a, "mesh"_a, "lists"_a,
             "sequence"_a, "order"_a = "zigzag", "dtype"_a = "float64", "seed"_a = 0, "experts"_a = 0,
             "experts_per_token"_a = 2, "router"_a = "renormalised",
             "mesh: ranks along (pp, dp, ep, sp, tp). lists: a schedule as text, str(make_schedule(...)) of "
             "pp_schedules.py. experts: in place of each MLP, of which no token is dropped; 0: none. router: "
             "renormalised or softmax. Collective.")
        .def("loss_and_gradients", &Model::loss_and_gradients, "tokens"_a, "targets"_a,
             "The loss of the global batch, from the samples int64 [B, S] of this rank's place along dp and "
             "ep, the "
             "same on all ranks along pp, sp and tp; sets the gradients. Targets of -100 do not count. "
             "Collective.")
        .def("gradient_norm", &Model::gradient_norm, Release(),
             "2-norm of the whole model's gradient. Collective.")
        .def("sgd", &Model::sgd, "rate"_a, Release())
        .def("adamw", &Model::adamw, "rate"_a = 1e-3, "betas"_a = std::pair(0.9, 0.999), "epsilon"_a = 1e-8,
             "decay"_a = 0.01, Release())
        .def(
            "weights", [](Model& self) { return self.values(false); },
            "Copies of this rank's parts, by name.")
        .def(
            "gradients", [](Model& self) { return self.values(true); },
            "Copies of this rank's parts, by name.")
        .def("places", &Model::places,
             "By name: shape of the whole, and where in it this rank's part begins.")
        .def_property_readonly("bytes_sent", &Model::bytes_sent,
                               "Bytes this rank sent in the last loss_and_gradients, by line of the mesh.")
        .def_property_readonly("seconds", &Model::seconds, "Seconds in these messages, by line of the mesh.")
        .def_property_readonly("bytes_by_formula", &Model::bytes_by_formula, "What they have to be.")
        .def_property_readonly(
            "rows_moved", &Model::rows_moved,
            "Rows of the last loss_and_gradients, to other ranks' experts or from other ranks; None before.");
}
