// What the command line of dp_mpi sets, and the samples that follow from it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "dp_mpi_exchange.hpp"
#include "fived/training.hpp"

namespace fived {

struct Settings : TrainingSettings {
    int context = 16, hidden = 256, layers = 3;
    double keep = 0.01;
    std::string strategy = "all";

    Settings() { batch = 53, bucket_mb = 0.25; }
    /// What --benchmark starts from: large enough that a step is mostly arithmetic.
    void prefer_benchmark() {
        steps = 10, batch = 4096, hidden = 1024, layers = 4, micro_batches = 1, bucket_mb = 2;
        dtype = "float32", optimizer = "adamw", scaling = "weak";
    }
    Options options() {
        Options options("Data parallelism by MPI, an MLP on bytes of text. Run it under mpirun.");
        add_to(options);
        options.add("context", context, 1, "bytes before the one to predict");
        options.add("hidden", hidden, 1, "width of the hidden layers");
        options.add("layers", layers, 1, "linear layers");
        options.add("strategy", strategy, {"all", "all-reduce", "zero1", "topk"}, "how gradients are summed");
        options.add("keep", keep, 1e-9, "share of the gradients that topk sends", 1.0);
        return options;
    }
    std::vector<int> sizes() const {
        std::vector<int> sizes(layers + 1, hidden);
        sizes.front() = 8 * context;
        sizes.back() = 256;
        return sizes;
    }
    /// By name, those that --strategy chooses.
    std::vector<std::pair<std::string, Strategy>> strategies() const {
        const std::size_t bucket_bytes(bucket_mb * (1 << 20));
        std::vector<std::pair<std::string, Strategy>> chosen{
            {"all-reduce", {.bucket_bytes = bucket_bytes}},
            {"zero1", {.zero = true, .bucket_bytes = bucket_bytes}},
            {"topk", {.keep = keep, .bucket_bytes = bucket_bytes}}};
        std::erase_if(chosen, [&](const auto& s) { return strategy != "all" && strategy != s.first; });
        return chosen;
    }
    void check(int ranks) {
        load();
        check_batch(ranks);
        if (std::size_t(context) >= text.train.size())
            throw UsageError("--context " + std::to_string(context) + " is longer than the text; at most " +
                             std::to_string(text.train.size() - 1));
    }
};

/// Samples [begin, end) of the global batch of a step.
template <class T>
struct Batch {
    std::vector<T> x;
    std::vector<std::uint8_t> y;
    MatrixView<const T> x_BI;

    Batch(const Settings& settings, int step, std::size_t begin, std::size_t end)
        : x((end - begin) * 8 * settings.context), y(end - begin) {
        const MatrixView<T> view(x.data(), end - begin, 8 * settings.context);
        mlp_samples<T>(settings.text.train, settings.seed, step, begin, view, y);
        x_BI = view;
    }
};

}  // namespace fived
