// The command line of dp_libtorch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "fived/options.hpp"
#include "models.hpp"

namespace fived {

struct Settings {
    std::string model = "gpt2-tiny", dtype = "float64", optimizer = "both", zero = "both", scaling = "strong",
                data, json;
    int steps = 3, batch = 10, sequence = 32, context = 16, hidden = 256, layers = 3, micro_batches = 2;
    std::uint64_t seed = 0;
    double bucket_mb = 0.1;
    bool benchmark = false;

    /// What --benchmark starts from: large enough that a step is mostly arithmetic.
    void prefer_benchmark() {
        model = "gpt2-10m", dtype = "float32", optimizer = "adamw", scaling = "weak";
        steps = 7, batch = 4, sequence = 64, hidden = 1024, layers = 4, micro_batches = 1, bucket_mb = 8;
    }
    /// These members as the command line names them.
    Options options() {
        Options options("Data parallelism and ZeRO-1 on LibTorch and MPI. Run it under mpirun.");
        options.add("model", model, {"gpt2-tiny", "gpt2-10m", "mlp"}, "what to train on bytes of text");
        options.add("steps", steps, 1, "steps of training");
        options.add("seed", seed, std::uint64_t{0}, "of weights and samples");
        options.add("dtype", dtype, {"float64", "float32"}, "arithmetic");
        options.add("batch", batch, 1, "samples a step: of all ranks, with weak scaling of each");
        options.add("sequence", sequence, 1, "gpt2: tokens of a sample");
        options.add("context", context, 1, "mlp: bytes before the one to predict");
        options.add("hidden", hidden, 1, "mlp: width of the hidden layers");
        options.add("layers", layers, 1, "mlp: linear layers");
        options.add("micro-batches", micro_batches, 1, "parts in which a rank works off its samples");
        options.add("bucket-mb", bucket_mb, 1e-5, "MiB of gradients that travel together");
        options.add("optimizer", optimizer, {"both", "sgd", "adamw"}, "what to train with");
        options.add("zero", zero, {"both", "0", "1"}, "stage of ZeRO; 0 sums gradients by all-reduce");
        options.add("data", data, "a file or folder of text instead of Python's standard library");
        options.add("json", json, "append a record of each stage to this file");
        options.flag("benchmark", benchmark,
                     "time the steps, compare nothing; with --help: its own defaults");
        options.add("scaling", scaling, {"strong", "weak"}, "what --batch means");
        return options;
    }
    int longest() const { return model == "gpt2-10m" ? 256 : 64; }
    std::size_t global_batch(int ranks) const { return std::size_t(batch) * (scaling == "weak" ? ranks : 1); }
    /// Throws UsageError for what cannot work.
    void check(int ranks, const Text& text) const {
        const std::size_t least = std::size_t(ranks) * micro_batches;
        if (global_batch(ranks) < least)
            throw UsageError("--batch " + std::to_string(batch) + " is too small for " +
                             std::to_string(ranks) + " ranks x " + std::to_string(micro_batches) +
                             " micro-batches; at least " +
                             std::to_string(scaling == "weak" ? std::size_t(micro_batches) : least));
        if (model != "mlp" && sequence > longest())
            throw UsageError("--sequence " + std::to_string(sequence) + " is too long for " + model +
                             "; at most " + std::to_string(longest()));
        if (std::size_t(model == "mlp" ? context : sequence) >= text.train.size())
            throw UsageError("a sample is longer than the text of " + std::to_string(text.train.size()) +
                             " bytes");
    }
    at::ScalarType type() const { return dtype == "float64" ? at::kDouble : at::kFloat; }
    std::shared_ptr<Model> make_model(std::uint64_t seed) const {
        if (model == "mlp") return std::make_shared<ByteMlp>(context, hidden, layers, seed, type());
        if (model == "gpt2-tiny") return std::make_shared<Gpt2>(2, 64, 4, longest(), sequence, seed, type());
        return std::make_shared<Gpt2>(6, 384, 6, longest(), sequence, seed, type());
    }
};

}  // namespace fived
