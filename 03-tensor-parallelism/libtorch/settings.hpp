// The command line of tp_libtorch.
#pragma once

#include <stdexcept>
#include <string>

#include "gpt2.hpp"

namespace fived {

struct Settings : TorchTrainingSettings {
    int heads = 0;

    Settings() { batch = 10; }
    /// What --benchmark starts from: large enough that a step is mostly arithmetic.
    void prefer_benchmark() {
        model = ModelKind::gpt2_10m, dtype = Dtype::float32, optimizer = OptimizerKind::adamw;
        steps = 7, batch = 4, sequence = 64, micro_batches = 1;
    }
    Options options() {
        Options options("Megatron's tensor parallelism on LibTorch and MPI. Run it under mpirun.");
        options.add("model", model, {ModelKind::gpt2_tiny, ModelKind::gpt2_10m},
                    "what to train on bytes of text");
        options.add("heads", heads, 0,
                    "heads of a layer, which the ranks share; 0: as many as the model has");
        options.add("sequence", sequence, 1, "tokens of a sample");
        add_to(options, "samples a step, the same on all ranks", "parts in which the samples are worked off",
               "");
        return options;
    }
    Gpt2 shape() const {
        Gpt2 shape{TorchTrainingSettings::shape()};
        if (heads > 0) shape.heads = heads;
        return shape;
    }
    /// Throws UsageError for what cannot work.
    void check(int ranks) {
        load();
        const Gpt2 gpt2 = shape();
        std::string divisors;
        for (int k = 1; k <= gpt2.width; ++k)
            if (gpt2.width % k == 0) divisors += (k == 1 ? "" : ", ") + std::to_string(k);
        if (gpt2.width % gpt2.heads)
            throw UsageError("--heads " + std::to_string(heads) + " do not divide the width " +
                             std::to_string(gpt2.width) + " of " + name_of(model) + "; " + divisors +
                             " would");
        try {
            check_heads(gpt2.heads, ranks);
        } catch (const std::invalid_argument& error) {
            throw UsageError(error.what());
        }
        if (micro_batches > batch)
            throw UsageError("--micro-batches " + std::to_string(micro_batches) + " of --batch " +
                             std::to_string(batch) + "; at most " + std::to_string(batch));
        check_sequence();
    }
};

}  // namespace fived
