// What the binaries that train share: their command line, and what main() does with it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fived/lesson.hpp"
#include "fived/options.hpp"
#include "fived/record.hpp"
#include "fived/text.hpp"

namespace fived {

struct TrainingSettings {
    int steps = 3, batch = 1, micro_batches = 2;
    std::uint64_t seed = 0;
    double bucket_mb = 1;
    std::string dtype = "float64", optimizer = "both", scaling = "strong", data, json;
    bool benchmark = false;

    /// These members as the command line names them; they must outlive `options`.
    void add_to(Options& options) {
        options.add("steps", steps, 1, "steps of training");
        options.add("seed", seed, std::uint64_t{0}, "of weights and samples");
        options.add("dtype", dtype, {"float64", "float32"}, "arithmetic");
        options.add("batch", batch, 1, "samples a step: of all ranks, with weak scaling of each");
        options.add("micro-batches", micro_batches, 1, "parts in which a rank works off its samples");
        options.add("bucket-mb", bucket_mb, 1e-5, "MiB of gradients that travel together");
        options.add("optimizer", optimizer, {"both", "sgd", "adamw"}, "what to train with");
        options.add("data", data, "a file or folder of text instead of Python's standard library");
        options.add("json", json, "append a record of each way to train to this file");
        options.flag("benchmark", benchmark,
                     "time the steps, compare nothing; with --help: its own defaults");
        options.add("scaling", scaling, {"strong", "weak"}, "what --batch means");
    }
    std::size_t global_batch(int ranks) const { return std::size_t(batch) * (scaling == "weak" ? ranks : 1); }
    /// Throws UsageError where a micro-batch would be empty.
    void check_batch(int ranks) const {
        const std::size_t least = std::size_t(ranks) * micro_batches;
        if (global_batch(ranks) < least)
            throw UsageError("--batch " + std::to_string(batch) + " is too small for " +
                             std::to_string(ranks) + " ranks x " + std::to_string(micro_batches) +
                             " micro-batches; at least " +
                             std::to_string(scaling == "weak" ? std::size_t(micro_batches) : least));
    }
};

/// run_lesson for `settings` that have options(), prefer_benchmark() and check(ranks, text); `body(text)` trains.
template <class Settings, class Body>
int run_training_lesson(const Communicator& world, const std::string& name, int argc, char** argv,
                        Settings& settings, Body body) {
    if (given(argc, argv, "--benchmark")) settings.prefer_benchmark();
    const Options options = settings.options();
    Text text;
    const auto prepare = [&] {
        text = load_text(settings.data);
        settings.check(world.size(), text);
        if (!settings.json.empty() && world.rank() == 0) check_writable(settings.json);
    };
    return run_lesson(world, name, argc, argv, options, prepare, [&] { return body(text); });
}

}  // namespace fived
