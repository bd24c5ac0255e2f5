// Python module pp_libtorch: GPT-2 in a pipeline on torch.distributed process groups.
#include <string>

#include "fived/torch/parameters.hpp"
#include "fived/torch/python.hpp"
#include "pp_libtorch.hpp"

namespace {

namespace py = pybind11;
using fived::find, fived::Parameters, fived::Pipeline, fived::RanksPtr, fived::Schedule, fived::Waiting;

/// Of a whole model with these parameters.
fived::Gpt2Shape shape_of(const Parameters& whole, int heads) {
    const at::Tensor &tokens = find(whole, "embed_tokens.weight"),
                     &positions = find(whole, "embed_positions.weight");
    int layers = 0;
    while (whole.contains("layers." + std::to_string(layers) + ".mlp_norm.weight")) ++layers;
    const int width = int(tokens.size(1));
    if (heads < 1 || width % heads)
        throw std::invalid_argument("width " + std::to_string(width) + " does not divide into " +
                                    std::to_string(heads) + " heads");
    return {layers, width, heads, int(positions.size(0)), int(tokens.size(0))};
}

Pipeline pipeline(const Parameters& whole, int heads, const std::string& schedule, const RanksPtr& up,
                  const RanksPtr& down) {
    const Schedule list = fived::read_schedule(schedule);
    Pipeline pipe(shape_of(whole, heads), list, up, down, find(whole, "embed_tokens.weight").options());
    pipe.fill([&](const std::string& name, at::IntArrayRef) { return find(whole, name); });
    return pipe;
}

}  // namespace

PYBIND11_MODULE(pp_libtorch, module) {
    using namespace py::literals;
    module.doc() =
        "Pipeline parallelism in C++ on LibTorch's autograd and c10d: runs the schedules that "
        "pp_schedules.py makes.";
    py::register_local_exception<fived::UsageError>(module, "UsageError", PyExc_ValueError);
    fived::add_ranks(module, "pp");
    module.def(
        "check", [](const std::string& schedule) { fived::read_schedule(schedule); }, "schedule"_a,
        "Raises UsageError for a text that is no schedule, or one that would compute something wrong or "
        "hang.");
    py::class_<Pipeline, fived::Owner<Pipeline>> pipe(
        module, "Pipeline",
        "GPT-2 in stages. whole: {name: parameter}, the same on all ranks, of which "
        "this rank copies its own. schedule: as "
        "text, one line a rank. up, down: the same ranks in two groups. Raises "
        "ValueError for what does not fit.");
    pipe.def(py::init(&pipeline), "whole"_a, "heads"_a, "schedule"_a, "up"_a.none(false),
             "down"_a.none(false))
        .def("parameters", &Pipeline::parameters,
             "{name: parameter} of this rank. The first rank and the last hold the embedding.")
        .def("run", &Pipeline::run, "parts"_a, "scale"_a, Waiting(),
             "Forward and backward of all micro-batches, a list of (tokens_BS, targets_BS); returns the sum "
             "of their losses, "
             "the same on all ranks. Gradients are those of the losses times scale.");
    fived::add_messages(pipe);
}
