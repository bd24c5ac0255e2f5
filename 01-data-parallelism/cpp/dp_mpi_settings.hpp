// What the command line of dp_mpi sets.
#pragma once

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "dp_mpi_exchange.hpp"
#include "fived/lesson/mlp_training.hpp"

namespace fived {

/// The three rows of dp_mpi_exchange.hpp, whose first is "plain" there.
enum class Method { all_reduce, zero1, topk };
constexpr auto names(Method) {
    return std::array{"all-reduce", "zero1", "topk"};
}

struct Settings : MlpSettings {
    double keep = 0.01;
    std::optional<Method> versions;  // none: all, one after the other

    Settings() { batch = 53, bucket_mb = 0.25; }
    /// What --benchmark starts from: large enough that a step is mostly arithmetic.
    void prefer_benchmark() {
        steps = 10, batch = 4096, hidden = 1024, layers = 4, micro_batches = 1, bucket_mb = 2;
        dtype = Dtype::float32, optimizer = OptimizerKind::adamw, scaling = Scaling::weak;
    }
    Options options() {
        Options options("Data parallelism by MPI, an MLP on bytes of text. Run it under mpirun.");
        add_to(options);
        add_model_to(options);
        options.add("versions", versions, "all", "how gradients are summed");
        options.add("k", keep, 1e-9, "share of the gradients that topk sends", 1.0);
        return options;
    }
    /// Those that --versions chooses.
    std::vector<std::pair<Method, Strategy>> strategies() const {
        const std::size_t bucket_bytes(bucket_mb * (1 << 20));
        std::vector<std::pair<Method, Strategy>> chosen{
            {Method::all_reduce, {.bucket_bytes = bucket_bytes}},
            {Method::zero1, {.zero = true, .bucket_bytes = bucket_bytes}},
            {Method::topk, {.keep = keep, .bucket_bytes = bucket_bytes}}};
        std::erase_if(chosen, [&](const auto& s) { return versions && versions != s.first; });
        return chosen;
    }
    void check(int ranks) {
        load();
        check_batch(ranks);
        check_context();
    }
};

}  // namespace fived
