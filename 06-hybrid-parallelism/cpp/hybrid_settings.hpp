// What the command line of hybrid_mpi sets, and what fits together.
#pragma once

#include <array>
#include <string>

#include "fived/lesson/run.hpp"
#include "fived/lesson/schedule_settings.hpp"
#include "fived/lesson/training.hpp"
#include "hybrid_mesh.hpp"
#include "hybrid_shape.hpp"
#include "sp_mpi.hpp"

namespace fived {

/// Configurations of common/models/configs.py.
enum class ModelKind { gpt2_tiny, gpt2_deep, gpt2_10m, gpt2_moe_tiny };
constexpr auto names(ModelKind) {
    return std::array{"gpt2-tiny", "gpt2-deep", "gpt2-10m", "gpt2-moe-tiny"};
}

/// Rings: zigzag gives all ranks equal work.
enum class RingKind { zigzag, ring };
constexpr auto names(RingKind) {
    return std::array{"zigzag", "ring"};
}

struct Settings : TrainingSettings, ScheduleSettings, RunSettings {
    MeshShape mesh{.dp = 0};  // 0: all ranks that the other axes leave
    ModelKind model = ModelKind::gpt2_tiny;
    RingKind attention = RingKind::zigzag;
    int sequence = 32;
    bool explain = false;

    Settings() {
        batch = 16;
        schedule = ScheduleKind::one_f_one_b;
    }
    /// What --benchmark starts from.
    void prefer_benchmark() {
        model = ModelKind::gpt2_10m, batch = 8, sequence = 128, steps = 5, dtype = Dtype::float32;
        optimizer = OptimizerKind::adamw;
    }
    /// What --train starts from, as train_llama.py does.
    void prefer_train() {
        sequence = 64, steps = 100, dtype = Dtype::float32, clip = 1;
        optimizer = OptimizerKind::adamw;
    }
    Options options() {
        Options options("Five axes by MPI: GPT-2 on bytes of text. Run it under mpirun.");
        const auto axis = [&](Axis a, int& size, int least, const char* help) {
            options.add(name_of(a), size, least, help, 4096);
        };
        axis(Axis::pp, mesh.pp, 1, "ranks along pp: stages of layers");
        axis(Axis::dp, mesh.dp, 0, "ranks along dp: replicas of the model; 0: all that the other axes leave");
        axis(Axis::ep, mesh.ep, 1, "ranks along ep: experts, and one more axis of samples");
        axis(Axis::sp, mesh.sp, 1, "ranks along sp: parts of the sequence");
        axis(Axis::tp, mesh.tp, 1, "ranks along tp: parts of each matrix");
        add_to(options, "samples a step, of all ranks together",
               "parts in which a rank works off its samples", " of each schedule");
        options.add("model", model, "what is trained");
        options.add("sequence", sequence, 1, "tokens of a sample");
        options.add("attention", attention, "order of the positions along sp");
        add_schedule_to(options);
        add_run_to(options);
        options.flag("explain", explain, "print the place of each rank, and the bytes of a step");
        return options;
    }
    ModelShape shape() const {
        if (model == ModelKind::gpt2_10m) return {6, 384, 6, 256};
        if (model == ModelKind::gpt2_deep) return {16, 32, 2, 64};
        if (model == ModelKind::gpt2_moe_tiny) return {2, 64, 4, 64, 8};
        return {2, 64, 4, 64};
    }
    Order order() const { return attention == RingKind::zigzag ? Order::zigzag : Order::contiguous; }
    /// Of a step.
    double tokens() const { return double(batch) * sequence; }
    double flop() const { return tokens() * shape().flop_per_token(std::size_t(sequence)); }

    /// Collective: rank 0 alone reads the schedules.
    void check(const Communicator& world) {
        check_run(*this, timed_optimizer() == OptimizerKind::adamw);
        if (clip > 0 && !train) throw UsageError("--clip goes with --train; give that, too");
        place(world.size());
        check_shape();
        make_schedules(world, mesh.pp, batch / (mesh.dp * mesh.ep), micro_batches, int(shape().layers),
                       std::to_string(shape().layers) + " layers of " + name_of(model));
        load();
        check_sample(sequence);
    }

  private:
    void place(int ranks) {
        const std::int64_t others = std::int64_t(mesh.pp) * mesh.ep * mesh.sp * mesh.tp;
        const std::int64_t fits = ranks % others == 0 ? ranks / others : 0;
        if (mesh.dp == 0) mesh.dp = std::max(1, int(ranks / others));
        if (mesh.ranks() != ranks)
            throw UsageError("mesh " + mesh.name() + " needs " + std::to_string(mesh.ranks()) +
                             " ranks, the world has " + std::to_string(ranks) + "; " +
                             (fits ? "dp=" + std::to_string(fits)
                                   : "a world of " + std::to_string(mesh.ranks()) + " ranks") +
                             " would fit");
    }
    void check_shape() const {
        const ModelShape s = shape();
        if (int(s.heads) % mesh.tp) {
            std::string divisors;
            for (std::size_t k = 1; k <= s.heads; ++k)
                if (s.heads % k == 0) divisors += (k == 1 ? "" : ", ") + std::to_string(k);
            throw UsageError(std::to_string(s.heads) + " heads do not divide over " +
                             std::to_string(mesh.tp) + " ranks along tp; " + divisors + " would do");
        }
        if (s.experts && std::size_t(mesh.ep) > s.experts)
            throw UsageError(std::to_string(mesh.ep) + " ranks along ep are more than the " +
                             std::to_string(s.experts) + " experts; at most " + std::to_string(s.experts) +
                             " would do");
        if (std::size_t(sequence) > s.longest)
            throw UsageError("a sequence of " + std::to_string(sequence) +
                             " tokens is too long for a model with " + std::to_string(s.longest) +
                             " learned positions");
        const int parts = mesh.sp == 1 ? 1 : attention == RingKind::zigzag ? 2 * mesh.sp : mesh.sp;
        if (sequence % parts) {
            const int below = sequence / parts * parts;
            throw UsageError("a sequence of " + std::to_string(sequence) + " tokens does not divide into " +
                             std::to_string(parts) + " pieces, which " + name_of(attention) + " order on " +
                             std::to_string(mesh.sp) + " ranks needs; " +
                             (below ? std::to_string(below) + " or " : "") + std::to_string(below + parts) +
                             " would");
        }
        const int places = mesh.dp * mesh.ep;
        if (batch / places < micro_batches)
            throw UsageError("--batch " + std::to_string(batch) + " gives each of " + std::to_string(places) +
                             " places along dp and ep " + std::to_string(batch / places) +
                             " samples, too few for " + std::to_string(micro_batches) +
                             " micro-batches; give --batch " + std::to_string(places * micro_batches) +
                             ", or fewer micro-batches");
    }
};

}  // namespace fived
