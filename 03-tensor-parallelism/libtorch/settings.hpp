// The command line of tp_libtorch.
#pragma once

#include <stdexcept>
#include <string>

#include "fived/training.hpp"
#include "gpt2.hpp"

namespace fived {

struct Settings : TrainingSettings {
    std::string model = "gpt2-tiny";
    int sequence = 32, heads = 0;

    Settings() { batch = 10; }
    /// What --benchmark starts from: large enough that a step is mostly arithmetic.
    void prefer_benchmark() {
        model = "gpt2-10m", dtype = "float32", optimizer = "adamw";
        steps = 7, batch = 4, sequence = 64, micro_batches = 1;
    }
    Options options() {
        Options options("Megatron's tensor parallelism on LibTorch and MPI. Run it under mpirun.");
        options.add("model", model, {"gpt2-tiny", "gpt2-10m"}, "what to train on bytes of text");
        options.add("heads", heads, 0,
                    "heads of a layer, which the ranks share; 0: as many as the model has");
        options.add("batch", batch, 1, "samples a step, the same on all ranks");
        options.add("sequence", sequence, 1, "tokens of a sample");
        options.add("micro-batches", micro_batches, 1, "parts in which the samples are worked off");
        options.add("steps", steps, 1, "steps of training");
        options.add("seed", seed, std::uint64_t{0}, "of weights and samples");
        options.add("dtype", dtype, {"float64", "float32"}, "arithmetic");
        options.add("optimizer", optimizer, {"both", "sgd", "adamw"}, "what to train with");
        options.add("data", data, "a file or folder of text instead of Python's standard library");
        options.add("json", json, "append a record to this file");
        options.flag("benchmark", benchmark,
                     "time the steps, compare nothing; with --help: its own defaults");
        return options;
    }
    Gpt2 shape() const {
        Gpt2 shape = model == "gpt2-tiny" ? Gpt2{2, 64, 4, 64} : Gpt2{6, 384, 6, 256};
        if (heads > 0) shape.heads = heads;
        return shape;
    }
    /// Throws UsageError for what cannot work.
    void check(int ranks, const Text& text) const {
        const Gpt2 gpt2 = shape();
        std::string divisors;
        for (int k = 1; k <= gpt2.width; ++k)
            if (gpt2.width % k == 0) divisors += (k == 1 ? "" : ", ") + std::to_string(k);
        if (gpt2.width % gpt2.heads)
            throw UsageError("--heads " + std::to_string(heads) + " do not divide the width " +
                             std::to_string(gpt2.width) + " of " + model + "; " + divisors + " would");
        try {
            check_heads(gpt2.heads, ranks);
        } catch (const std::invalid_argument& error) {
            throw UsageError(error.what());
        }
        if (micro_batches > batch)
            throw UsageError("--micro-batches " + std::to_string(micro_batches) + " of --batch " +
                             std::to_string(batch) + "; at most " + std::to_string(batch));
        if (sequence > gpt2.longest)
            throw UsageError("--sequence " + std::to_string(sequence) + " is too long for " + model +
                             "; at most " + std::to_string(gpt2.longest));
        if (std::size_t(sequence) >= text.train.size())
            throw UsageError("a sample is longer than the text of " + std::to_string(text.train.size()) +
                             " bytes");
    }
    at::ScalarType type() const { return dtype == "float64" ? at::kDouble : at::kFloat; }
    double tokens() const { return double(batch) * sequence; }
};

}  // namespace fived
