// The command line of hybrid_libtorch.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "fived/lesson/run.hpp"
#include "fived/lesson/schedule_settings.hpp"
#include "fived/torch/training.hpp"
#include "hybrid_libtorch.hpp"
#include "tp_libtorch.hpp"

namespace fived {

/// Of common/models/configs.py.
enum class HybridModel {
    gpt2_tiny,
    gpt2_deep,
    gpt2_10m,
    gpt2_moe_tiny,
    llama_tiny,
    llama_deep,
    llama_10m,
    mixtral_tiny,
    mixtral_31m
};
constexpr auto names(HybridModel) {
    return std::array{"gpt2-tiny",  "gpt2-deep", "gpt2-10m",     "gpt2-moe-tiny", "llama-tiny",
                      "llama-deep", "llama-10m", "mixtral-tiny", "mixtral-31m"};
}

inline Shape shape_of(HybridModel model) {
    constexpr int V = vocabulary;
    switch (model) {
        case HybridModel::gpt2_tiny:
            return {2, 64, 4, 4, 256, 64};
        case HybridModel::gpt2_deep:
            return {16, 32, 2, 2, 128, 64};
        case HybridModel::gpt2_10m:
            return {6, 384, 6, 6, 1536, 256};
        case HybridModel::gpt2_moe_tiny:
            return {2, 64, 4, 4, 256, 64, V, false, 8};
        case HybridModel::llama_tiny:
            return {2, 64, 4, 2, 176, 64, V, true};
        case HybridModel::llama_deep:
            return {16, 32, 2, 1, 88, 64, V, true};
        case HybridModel::llama_10m:
            return {6, 384, 6, 2, 1024, 256, V, true};
        case HybridModel::mixtral_tiny:
            return {2, 64, 4, 2, 88, 64, V, true, 8, 2, 1e6};
        default:
            return {6, 384, 6, 2, 512, 256, V, true, 8, 2, 1e6};
    }
}

struct Settings : TrainingSettings, ScheduleSettings, RunSettings {
    HybridModel model = HybridModel::gpt2_tiny;
    int sequence = 32, pp = 1, dp = 0, ep = 1, sp = 1, tp = 1;  // dp 0: all ranks that the other axes leave
    ScheduleKind kind = ScheduleKind::one_f_one_b;
    Order attention = Order::zigzag;
    bool sequence_parallel = false;
    int zero = 0;

    Settings() { batch = 16; }
    /// What --benchmark starts from: large enough that a step is mostly arithmetic.
    void prefer_benchmark() {
        model = HybridModel::gpt2_10m, dtype = Dtype::float32, optimizer = OptimizerKind::adamw;
        steps = 5, batch = 8, sequence = 64;
    }
    /// What --train starts from, as train_llama.py does.
    void prefer_train() {
        model = HybridModel::llama_tiny, dtype = Dtype::float32, optimizer = OptimizerKind::adamw;
        steps = 100, sequence = 64, clip = 1;
    }
    Options options() {
        Options options("All five strategies on LibTorch and MPI. Run it under mpirun.");
        options.add("pp", pp, 1, "ranks along pp: stages of layers", 4096);
        options.add("dp", dp, 0,
                    "ranks along dp: replicas of the model; 0: all ranks that the other axes leave", 4096);
        options.add("ep", ep, 1, "ranks along ep: experts, and one more axis of samples", 4096);
        options.add("sp", sp, 1, "ranks along sp: shards of the sequence", 4096);
        options.add("tp", tp, 1, "ranks along tp: shards of each matrix", 4096);
        options.add("model", model, "what to train on bytes of text");
        options.add("sequence", sequence, 1, "tokens of a sample");
        add_to(options, "samples a step, of all ranks", "parts in which a rank works off its samples", "");
        options.add("schedule", kind, "order of the passes on each stage");
        options.add("chunks", chunks, 1, "stages of each rank in the interleaved schedule", 1000);
        options.add("attention", attention, "order of the positions along sp");
        options.flag("sequence-parallel", sequence_parallel,
                     "Megatron's: between the regions each rank along tp has a slice of the tokens");
        options.add("zero", zero, 0, "1 shards the optimizer's states over all ranks that hold a parameter",
                    1);
        add_run_to(options);
        return options;
    }
    Mesh::Shape mesh() const { return {pp, dp, ep, sp, tp}; }
    int places() const { return dp * ep; }  // with samples of their own
    Shape shape() const { return shape_of(model); }
    at::ScalarType type() const { return torch_type(dtype); }
    double tokens() const { return double(batch) * sequence; }
    double targets() const { return double(count_targets(batch, sequence)); }
    double flop() const { return tokens() * shape().flop_per_token(sequence); }
    Layout layout() const {
        return {schedules[0].second, attention, Kernel::library, sequence_parallel, zero > 0};
    }

    /// Throws UsageError for what cannot work. Collective.
    void check(const Communicator& world) {
        check_run(*this, timed_optimizer() == OptimizerKind::adamw);
        check_mesh(world.size());
        check_layout();
        const int samples = batch / places();
        if (samples < micro_batches)
            throw UsageError("--batch " + std::to_string(batch) + " gives each of " +
                             std::to_string(places()) + " places along dp and ep " + std::to_string(samples) +
                             " samples, too few for " + std::to_string(micro_batches) +
                             " micro-batches; give --batch " + std::to_string(places() * micro_batches) +
                             ", or fewer micro-batches");
        schedule = kind;
        const int layers = shape().layers;
        make_schedules(world, pp, samples, micro_batches, layers,
                       std::to_string(layers) + " layers of " + name_of(model));
        load();
        check_sample(sequence);
    }

  private:
    void check_mesh(int ranks) {
        const std::int64_t others = std::int64_t(pp) * ep * sp * tp;
        if (dp == 0) dp = int(std::max<std::int64_t>(1, ranks / others));
        if (others * dp == ranks) return;
        std::string given;
        for (const Axis axis : every_axis)
            given += std::string(" ") + name_of(axis) + "=" + std::to_string(mesh()[std::size_t(axis)]);
        throw UsageError("mesh" + given + " needs " + std::to_string(others * dp) + " ranks, the world has " +
                         std::to_string(ranks) + "; " +
                         (ranks % others ? "a world of " + std::to_string(others * dp) + " ranks"
                                         : "dp=" + std::to_string(ranks / others)) +
                         " would fit");
    }
    void check_layout() const {
        const Shape s = shape();
        try {
            check_heads(s.heads, tp);
            if (s.experts) check_split(s.experts, ep);
            if (sp > 1) places_of(sequence);
        } catch (const std::invalid_argument& error) {
            throw UsageError(error.what());
        }
        if (sequence_parallel && tp == 1)
            throw UsageError(
                "--sequence-parallel cuts the tokens over tp, which has 1 rank here; give --tp 2, or leave "
                "it out");
        if (!s.llama && sequence > s.longest)
            throw UsageError("--sequence " + std::to_string(sequence) + " is too long for " + name_of(model) +
                             "; at most " + std::to_string(s.longest));
    }
    void places_of(int S) const { fived::places(S, attention, 0, sp); }
};

}  // namespace fived
