// The order in which a training run sees samples: endless, shuffled anew in every epoch, as common/data/sampler.py has it.
//
//     position   0  1  2  3  4  5  6 | 7  8  9 10 11 12 13 | 14 15 ...       7 samples
//     sample     3  0  6  1  5  2  4 | 2  6  0  4  3  1  5 |  1  6 ...       each epoch has every sample once
//
// Step t of batches of B takes positions t B to (t + 1) B: a resumed run sees the very next batch, on any mesh.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "fived/math/matrix.hpp"
#include "fived/math/random.hpp"

namespace fived {

class Sampler {
  public:
    Sampler(std::span<const std::uint8_t> text, std::uint64_t seed, std::size_t sequence)
        : text_(text), seed_(seed), sequence_(sequence), order_((text.size() - 1) / sequence) {}

    /// The samples at positions from `begin` on: S bytes each (tokens_BS) and of each the byte that follows (targets_BS).
    void take(std::uint64_t begin, MatrixView<std::int64_t> tokens_BS, MatrixView<std::int64_t> targets_BS) {
        for (std::size_t b = 0; b < tokens_BS.rows; ++b) {
            const std::uint8_t* window = text_.data() + sample(begin + b) * sequence_;
            std::copy_n(window, sequence_, tokens_BS.row(b).begin());
            std::copy_n(window + 1, sequence_, targets_BS.row(b).begin());
        }
    }

  private:
    std::size_t sample(std::uint64_t position) {
        const std::uint64_t epoch = position / order_.size();
        if (epoch != epoch_) {
            const std::uint64_t stream = stream_of("epoch " + std::to_string(epoch_ = epoch));
            std::iota(order_.begin(), order_.end(), 0);
            std::ranges::sort(order_, {}, [&](std::size_t i) { return random_bits(seed_, stream, i); });
        }
        return order_[position % order_.size()];
    }

    std::span<const std::uint8_t> text_;
    std::uint64_t seed_;
    std::size_t sequence_;
    std::uint64_t epoch_ = ~std::uint64_t{0};  // whose order this is
    std::vector<std::size_t> order_;
};

}  // namespace fived
