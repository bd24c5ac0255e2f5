// The command line of ep_libtorch.
#pragma once

#include <stdexcept>
#include <string>

#include "ep_libtorch.hpp"
#include "fived/torch/training.hpp"

namespace fived {

struct Settings : TorchTrainingSettings {
    int experts = 8, experts_per_token = 2, expert_width = 0;
    Weights router = Weights::renormalised;

    Settings() { batch = 10; }
    /// What --benchmark starts from: large enough that a step is mostly arithmetic.
    void prefer_benchmark() {
        model = ModelKind::gpt2_10m, dtype = Dtype::float32, optimizer = OptimizerKind::adamw;
        steps = 7, batch = 8, sequence = 64, micro_batches = 1, expert_width = 512;
    }
    Options options() {
        Options options("Expert parallelism on LibTorch and MPI, dropless. Run it under mpirun.");
        options.add("model", model, {ModelKind::gpt2_tiny, ModelKind::gpt2_10m},
                    "every MLP of which is a mixture of experts");
        options.add("experts", experts, 1, "of a layer, spread over the ranks");
        options.add("experts-per-token", experts_per_token, 1, "how many a token passes");
        options.add("expert-width", expert_width, 0, "of an expert's hidden layer; 0: 4 times the model's");
        options.add("router", router, {Weights::renormalised, Weights::softmax},
                    "Mixtral's weights, or Switch's");
        options.add("sequence", sequence, 1, "tokens of a sample");
        add_to(options, "samples a step, of all ranks", "parts in which a rank works off its samples", "");
        return options;
    }
    /// Throws UsageError for what cannot work.
    void check(int ranks) {
        load();
        try {
            check_split(experts, ranks);
            check_choices(experts_per_token, experts);
        } catch (const std::invalid_argument& error) {
            throw UsageError(error.what());
        }
        check_batch(ranks);
        check_sequence();
    }
    int mlp_width() const { return expert_width > 0 ? expert_width : 4 * shape().width; }
    /// Attention's four matrices, the router, and of the experts those that a token chose.
    double flop() const {
        const Gpt2Shape s = shape();
        const double L = s.layers, D = s.width;
        const double matrices = 4 * D * D + experts * D + 2. * experts_per_token * mlp_width() * D;
        return tokens() * (6 * (L * matrices + s.vocabulary * D) + 12 * L * sequence * D);
    }
};

}  // namespace fived
