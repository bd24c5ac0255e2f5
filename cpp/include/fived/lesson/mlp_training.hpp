// What the binaries that train the MLP share: their command line, and the samples that follow from it.
#pragma once

#include <string>
#include <vector>

#include "fived/lesson/training.hpp"

namespace fived {

struct MlpSettings : TrainingSettings {
    int context = 16, hidden = 256, layers = 3;

    void add_model_to(Options& options) {
        options.add("context", context, 1, "bytes before the one to predict");
        options.add("hidden", hidden, 1, "width of the hidden layers", 1 << 20);
        options.add("layers", layers, 1, "linear layers", 1000);
    }
    std::vector<int> sizes() const {
        std::vector<int> sizes(layers + 1, hidden);
        sizes.front() = 8 * context;
        sizes.back() = 256;
        return sizes;
    }
    std::string model_name() const {
        std::string name;
        for (const int size : sizes()) name += (name.empty() ? "" : "-") + std::to_string(size);
        return name;
    }
    /// Throws UsageError where a sample does not fit; after load().
    void check_context() const {
        if (std::size_t(context) >= text.train.size())
            throw UsageError("--context " + std::to_string(context) + " is longer than the text; at most " +
                             std::to_string(text.train.size() - 1));
    }
};

/// Samples [begin, end) of the global batch of a step.
template <class T>
struct MlpBatch {
    std::vector<T> x;
    std::vector<std::uint8_t> y;
    MatrixView<const T> x_BI;

    MlpBatch(const MlpSettings& settings, int step, std::size_t begin, std::size_t end)
        : x((end - begin) * 8 * settings.context), y(end - begin) {
        const MatrixView<T> view(x.data(), end - begin, 8 * settings.context);
        mlp_samples<T>(settings.text.train, settings.seed, step, begin, view, y);
        x_BI = view;
    }
};

}  // namespace fived
