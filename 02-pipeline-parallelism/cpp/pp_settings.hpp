// What the command line of pp_mpi sets.
#pragma once

#include "fived/lesson/mlp_training.hpp"
#include "fived/lesson/schedule_settings.hpp"

namespace fived {

struct Settings : MlpSettings, ScheduleSettings {
    Settings() { batch = 53, layers = 9, hidden = 96, micro_batches = 8; }
    /// What --benchmark starts from: two stages of equal work, large enough that a step is mostly arithmetic.
    void prefer_benchmark() {
        steps = 3, batch = 4096, context = 48, hidden = 1024, layers = 8, micro_batches = 16;
        dtype = Dtype::float32, optimizer = OptimizerKind::adamw;
    }
    Options options() {
        Options options("Pipeline parallelism by MPI, an MLP on bytes of text. Run it under mpirun.");
        add_to(options, "samples a step; all pass every stage",
               "parts of the batch that follow one another through the stages", " of each schedule");
        add_model_to(options);
        add_schedule_to(options);
        return options;
    }
    /// Collective: rank 0 alone reads the lists.
    void check(const Communicator& world) {
        make_schedules(world, world.size(), batch, micro_batches, layers,
                       "--layers " + std::to_string(layers));
        load();
        check_context();
    }
};

}  // namespace fived
