// Python module hybrid_libtorch: a Transformer on a mesh of torch.distributed process groups.
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "fived/torch/python.hpp"
#include "hybrid_libtorch.hpp"

namespace {

namespace py = pybind11;
using namespace fived;
using namespace py::literals;

/// make(axes, places, purpose): a ProcessGroup, or None on ranks that are not in it.
Owner<Mesh> mesh(const Mesh::Shape& shape, int rank, const py::function& make) {
    const std::shared_ptr<py::function> kept(new py::function(make), [](py::function* function) {
        const py::gil_scoped_acquire held;
        delete function;
    });
    return Owner<Mesh>(new Mesh(shape, rank, [kept](const GroupOf& group) {
        const py::gil_scoped_acquire held;
        std::vector<std::string> axes;
        for (const Axis axis : group.axes) axes.emplace_back(name_of(axis));
        const py::object made = (*kept)(axes, group.places, group.purpose);
        return made.is_none() ? Group() : made.cast<Group>();
    }));
}

/// Of a TransformerConfig.
Shape shape_of(const py::object& config) {
    const auto number = [&](const char* name) { return config.attr(name).cast<int>(); };
    Shape shape{number("layers"),    number("width"),    number("heads"),     number("kv_heads"),
                number("mlp_width"), number("sequence"), number("vocabulary")};
    shape.llama = config.attr("norm").cast<std::string>() == "rmsnorm";
    shape.experts = number("experts"), shape.experts_per_token = number("experts_per_token");
    shape.rotary_base = config.attr("rotary_base").cast<double>();
    return shape;
}

Owner<Hybrid> hybrid(const py::object& config, Mesh& mesh, const Parameters& whole,
                     const std::string& schedule, const std::string& attention, bool sequence_parallel,
                     bool zero) {
    const Layout layout{read_schedule(schedule), parse<Order>("attention", attention), Kernel::library,
                        sequence_parallel, zero};
    const auto value = [&](const std::string& name, at::IntArrayRef) { return find(whole, name).detach(); };
    const Shape shape = shape_of(config);
    const at::ScalarType dtype = find(whole, "embed_tokens.weight").scalar_type();
    const py::gil_scoped_release waiting;  // ZeRO broadcasts: the thread that ends a message takes the GIL
    return Owner<Hybrid>(new Hybrid(shape, mesh, layout, dtype, value));
}

using Sent = std::tuple<std::string, std::string, double, double>;

/// [(axes, operation, bytes this rank sent, seconds it waited)] since the last call.
std::vector<Sent> sent(Hybrid& hybrid) {
    std::vector<Sent> list;
    for (const Mesh::Sent& s : hybrid.take_messages())
        list.emplace_back(s.axes, s.message.op, double(s.message.n_bytes) / s.ranks, s.message.seconds);
    return list;
}

}  // namespace

PYBIND11_MODULE(hybrid_libtorch, module) {
    module.doc() =
        "Five strategies on one Transformer, in C++ on LibTorch's autograd and c10d. On all ranks the same "
        "calls.";
    py::register_local_exception<UsageError>(module, "UsageError", PyExc_ValueError);
    py::class_<Mesh, Owner<Mesh>>(
        module, "Mesh",
        "shape: ranks along pp, dp, ep, sp, tp. make(axes, places, purpose): the process group of this "
        "rank, called on all ranks in the same order.")
        .def(py::init(&mesh), "shape"_a, "rank"_a, "make"_a);
    py::class_<Hybrid, Owner<Hybrid>>(
        module, "Hybrid",
        "This rank's part of a Transformer. config: a TransformerConfig of GPT-2, LLaMA or Mixtral, or GPT-2 "
        "with such experts. "
        "whole: {name: parameter} of the plain model, of which this rank copies its own. schedule: as "
        "text, for the ranks along pp.")
        .def(py::init(&hybrid), "config"_a, "mesh"_a, "whole"_a, "schedule"_a, "attention"_a = "zigzag",
             "sequence_parallel"_a = false, "zero"_a = false, py::keep_alive<1, 3>())
        .def(
            "parameters",
            [](const Hybrid& self) {
                std::map<std::string, at::Tensor> all;
                for (const Placed& p : self.parameters()) all.emplace(p.name, p.tensor);
                return all;
            },
            "{name: what this rank's optimizer steps on}.")
        .def(
            "pieces",
            [](const Hybrid& self, const Parameters& whole) {
                std::map<std::string, at::Tensor> all;
                for (const Placed& p : self.parameters())
                    if (whole.contains(p.name)) all.emplace(p.name, p.placement.piece(find(whole, p.name)));
                return all;
            },
            "whole"_a, "{name: this rank's piece} of tensors of the plain model.")
        .def(
            "gradient_axes",
            [](const Hybrid& self) {
                std::map<std::string, std::string> all;
                for (const Placed& p : self.parameters())
                    all.emplace(p.name, words(p.placement.gradient_axes()));
                return all;
            },
            "{name: the axes over which its gradient is summed}.")
        .def("step", &Hybrid::step, "tokens_BS"_a, "targets_BS"_a, Waiting(),
             "Leaves the gradients of the global batch; returns its loss. The samples of this rank's place "
             "along dp "
             "and ep.")
        .def("clip", &Hybrid::clip, "largest"_a, Waiting(),
             "Scales the gradients; returns their norm before.")
        .def("take_messages", &sent,
             "[(axes, operation, bytes this rank sent, seconds it waited)] since the last call.")
        .def_property_readonly("rows_moved", &Hybrid::rows_moved,
                               "Rows of the last step, to other ranks' experts or from other ranks.")
        .def("stepped", &Hybrid::stepped, Waiting(), "After the optimizer's step.");
}
