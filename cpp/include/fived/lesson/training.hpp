// The command line of the binaries that train on text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "fived/lesson/lesson.hpp"
#include "fived/lesson/options.hpp"
#include "fived/lesson/text.hpp"
#include "fived/math/optimizer.hpp"

namespace fived {

struct TrainingSettings : LessonSettings {
    int batch = 1, micro_batches = 2;
    double bucket_mb = 1;
    std::optional<OptimizerKind> optimizer;  // none: both, one after the other
    std::string data;
    Text text;  // of --data, once load() was called

    TrainingSettings() { steps = 3; }
    /// The optimizer of the steps that are timed.
    OptimizerKind timed_optimizer() const { return optimizer.value_or(OptimizerKind::adamw); }
    /// What every such binary has.
    void add_to(Options& options, const std::string& samples, const std::string& parts,
                const std::string& each) {
        LessonSettings::add_to(options, "steps of training", "of weights and samples", each,
                               "time the steps, compare nothing; with --help: its own defaults");
        options.add("batch", batch, 1, samples);
        options.add("micro-batches", micro_batches, 1, parts);
        options.add("optimizer", optimizer, "both", "what to train with");
        options.add("data", data, "a file or folder of text instead of Python's standard library");
    }
    /// What those that split the batch have.
    void add_to(Options& options) {
        add_to(options, "samples a step: of all ranks, with weak scaling of each",
               "parts in which a rank works off its samples", " of each way to train");
        options.add("bucket-mb", bucket_mb, 1e-5, "MiB of gradients that travel together");
        options.add("scaling", scaling, "what --batch means");
    }
    void load() { text = load_text(data); }
    /// Throws UsageError where a sample does not fit.
    void check_sample(int length) const {
        if (std::size_t(length) >= text.train.size())
            throw UsageError("a sample is longer than the text of " + std::to_string(text.train.size()) +
                             " bytes");
    }
    double megabytes() const { return double(text.train.size()) / 1e6; }
    std::size_t global_batch(int ranks) const {
        return std::size_t(batch) * (scaling == Scaling::weak ? ranks : 1);
    }
    /// Throws UsageError where a micro-batch would be empty.
    void check_batch(int ranks) const {
        const std::size_t least = std::size_t(ranks) * micro_batches;
        if (global_batch(ranks) < least)
            throw UsageError("--batch " + std::to_string(batch) + " is too small for " +
                             std::to_string(ranks) + " ranks x " + std::to_string(micro_batches) +
                             " micro-batches; at least " +
                             std::to_string(scaling == Scaling::weak ? std::size_t(micro_batches) : least));
    }
};

}  // namespace fived
