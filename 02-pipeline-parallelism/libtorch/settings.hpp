// The command line of pp_libtorch.
#pragma once

#include "fived/lesson/schedule_settings.hpp"
#include "fived/torch/training.hpp"

namespace fived {

struct Settings : TorchTrainingSettings, ScheduleSettings {
    Settings() { model = ModelKind::gpt2_deep, batch = 11, micro_batches = 8; }
    /// What --benchmark starts from: large enough that a step is mostly arithmetic.
    void prefer_benchmark() {
        model = ModelKind::gpt2_10m, dtype = Dtype::float32, optimizer = OptimizerKind::adamw;
        steps = 7, batch = 8, sequence = 64, micro_batches = 8;
    }
    Options options() {
        Options options("Pipeline parallelism on LibTorch and MPI. Run it under mpirun.");
        options.add("model", model, {ModelKind::gpt2_tiny, ModelKind::gpt2_deep, ModelKind::gpt2_10m},
                    "what to train on bytes of text");
        options.add("sequence", sequence, 1, "tokens of a sample");
        add_to(options, "samples a step; all pass every stage", "parts in which they pass",
               " of each schedule");
        add_schedule_to(options);
        return options;
    }
    /// Throws UsageError for what cannot work. Collective.
    void check(const Communicator& world) {
        const int layers = shape().layers;
        make_schedules(world, world.size(), batch, micro_batches, layers,
                       std::to_string(layers) + " layers of " + name_of(model));
        load();
        check_sequence();
    }
};

}  // namespace fived
