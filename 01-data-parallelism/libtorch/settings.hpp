// The command line of dp_libtorch.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>

#include "models.hpp"

namespace fived {

/// Stage 0 sums gradients by all-reduce: DataParallel. Stage 1: Zero1.
enum class ZeroStage { zero, one };
constexpr auto names(ZeroStage) {
    return std::array{"0", "1"};
}

struct Settings : TorchTrainingSettings {
    std::optional<ZeroStage> zero;  // none: both, one after the other
    int context = 16, hidden = 256, layers = 3;

    Settings() { batch = 10, bucket_mb = 0.1; }
    /// What --benchmark starts from: large enough that a step is mostly arithmetic.
    void prefer_benchmark() {
        model = ModelKind::gpt2_10m, dtype = Dtype::float32, optimizer = OptimizerKind::adamw;
        scaling = Scaling::weak;
        steps = 7, batch = 4, sequence = 64, hidden = 1024, layers = 4, micro_batches = 1, bucket_mb = 8;
    }
    Options options() {
        Options options("Data parallelism and ZeRO-1 on LibTorch and MPI. Run it under mpirun.");
        add_to(options);
        options.add("model", model, {ModelKind::gpt2_tiny, ModelKind::gpt2_10m, ModelKind::mlp},
                    "what to train on bytes of text");
        options.add("sequence", sequence, 1, "gpt2: tokens of a sample");
        options.add("context", context, 1, "mlp: bytes before the one to predict");
        options.add("hidden", hidden, 1, "mlp: width of the hidden layers", 1 << 20);
        options.add("layers", layers, 1, "mlp: linear layers", 1000);
        options.add("zero", zero, "both", "stage of ZeRO; 0 sums gradients by all-reduce");
        return options;
    }
    /// Throws UsageError for what cannot work.
    void check(int ranks) {
        load();
        check_batch(ranks);
        model == ModelKind::mlp ? check_sample(context) : check_sequence();
    }
    std::shared_ptr<Model> make_model(std::uint64_t seed) const {
        if (model == ModelKind::mlp) return std::make_shared<ByteMlp>(context, hidden, layers, seed, type());
        return std::make_shared<Gpt2>(shape(), sequence, seed, type());
    }
};

}  // namespace fived
