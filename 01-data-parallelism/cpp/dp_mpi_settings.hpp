// What the command line of dp_mpi sets.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "dp_mpi_exchange.hpp"
#include "fived/lesson/mlp_training.hpp"

namespace fived {

struct Settings : MlpSettings {
    double keep = 0.01;
    std::string versions = "all";

    Settings() { batch = 53, bucket_mb = 0.25; }
    /// What --benchmark starts from: large enough that a step is mostly arithmetic.
    void prefer_benchmark() {
        steps = 10, batch = 4096, hidden = 1024, layers = 4, micro_batches = 1, bucket_mb = 2;
        dtype = "float32", optimizer = "adamw", scaling = "weak";
    }
    Options options() {
        Options options("Data parallelism by MPI, an MLP on bytes of text. Run it under mpirun.");
        add_to(options);
        add_model_to(options);
        options.add("versions", versions, {"all", "all-reduce", "zero1", "topk"}, "how gradients are summed");
        options.add("k", keep, 1e-9, "share of the gradients that topk sends", 1.0);
        return options;
    }
    /// By name, those that --versions chooses.
    std::vector<std::pair<std::string, Strategy>> strategies() const {
        const std::size_t bucket_bytes(bucket_mb * (1 << 20));
        std::vector<std::pair<std::string, Strategy>> chosen{
            {"all-reduce", {.bucket_bytes = bucket_bytes}},
            {"zero1", {.zero = true, .bucket_bytes = bucket_bytes}},
            {"topk", {.keep = keep, .bucket_bytes = bucket_bytes}}};
        std::erase_if(chosen, [&](const auto& s) { return versions != "all" && versions != s.first; });
        return chosen;
    }
    void check(int ranks) {
        load();
        check_batch(ranks);
        check_context();
    }
};

}  // namespace fived
