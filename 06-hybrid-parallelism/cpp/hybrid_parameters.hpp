// A rank's parameters in flat arrays, each with the description from which all synchronisation follows:
//
//     a gradient is summed over exactly the axes along which tokens are split and its parameter is replicated;
//     a parameter counts once in the gradient norm.
//
//     parameter                    split along        gradient summed over      copies, for the norm
//     norm, bias after a sum       pp                 dp ep sp                  dp ep sp tp
//     q k v, up; o, down           pp tp              dp ep sp                  dp ep sp
//     embedding                    pp tp, but tied    dp ep sp, then its two    dp ep sp, and the two holders
//
// Parameters that are split alike lie together, so a sum is one message. Replicas share no message with shards: the
// rounding of a sum depends on a number's position in the message, and replicas must stay equal to the bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fived/math/kernels.hpp"
#include "fived/math/partition.hpp"
#include "fived/math/shard.hpp"
#include "hybrid_mesh.hpp"

namespace fived {

struct Placed : Shard {
    Axes split;         // ranks along these hold other parts of the model
    bool tied = false;  // the first and the last stage hold it together, on two ranks

    Axes summed() const { return token_axes.without(split); }
    /// Ranks that hold the same numbers.
    int copies(const Mesh& mesh) const {
        int copies = tied ? 2 : 1;
        for (const Axis axis : values_of<Axis>())
            if (!split.contains(axis)) copies *= mesh.size(axis);
        return copies;
    }
};

template <class T>
class Parameters {
  public:
    using Id = std::size_t;

    /// Declares a parameter [rows, columns] that all ranks of a stage hold.
    Id whole(const std::string& name, std::size_t rows, std::size_t columns = 1) {
        return add({{{name, 0, rows, columns}, rows, columns}, Axis::pp});
    }
    /// Declares the rows `part` of one that is split over tp.
    Id rows(const std::string& name, const Range& part, std::size_t whole, std::size_t columns = 1) {
        return add({{{name, 0, part.length, columns}, whole, columns, part.begin}, {Axis::pp, Axis::tp}});
    }
    Id columns(const std::string& name, std::size_t rows, const Range& part, std::size_t whole) {
        return add({{{name, 0, rows, part.length}, rows, whole, 0, part.begin}, {Axis::pp, Axis::tp}});
    }
    void tie(Id id) { all_[id].tied = true; }

    /// Lays out what was declared and gives it its initial values. layers: of the whole model.
    void make(std::size_t layers, std::uint64_t seed) {
        std::size_t end = 0;
        for (const Axes split : kinds())
            for (Placed& p : all_)
                if (p.split == split) p.offset = std::exchange(end, end + p.size());
        weights_.resize(end), gradients_.resize(end);
        for (const Placed& p : all_) {
            const Gpt2Initial value(p.name, layers, seed);
            for (std::size_t i = 0; i < p.size(); ++i) weights_[p.offset + i] = T(value(p.place(i)));
        }
    }

    std::span<const Placed> all() const { return all_; }
    std::span<T> weights() { return weights_; }
    std::span<T> gradients() { return gradients_; }
    std::span<T> vector(Id id) { return {weights_.data() + all_[id].offset, all_[id].size()}; }
    std::span<T> vector_gradient(Id id) { return {gradients_.data() + all_[id].offset, all_[id].size()}; }
    MatrixView<T> matrix(Id id) { return {vector(id).data(), all_[id].rows, all_[id].columns}; }
    MatrixView<T> matrix_gradient(Id id) {
        return {vector_gradient(id).data(), all_[id].rows, all_[id].columns};
    }

    /// P -> R: every gradient becomes that of the global batch. holders: the ranks of a tied parameter, which is last,
    /// because its two holders must step with the same bits. Collective.
    void sum_gradients(const Mesh& mesh, const Communicator* holders) {
        for (const Axes split : kinds()) {
            const auto [first, n] = run_of(split);
            mesh.along(token_axes.without(split)).all_reduce(std::span(gradients_).subspan(first, n));
        }
        for (const Placed& p : all_) {
            if (!p.tied) continue;
            const std::span<T> gradient = std::span(gradients_).subspan(p.offset, p.size());
            const Timer timer;
            holders->all_reduce(gradient);  // of 2 ranks: each sends as many bytes as it has
            mesh.along(Axis::pp).book(mesh.size(Axis::pp) * std::int64_t(gradient.size_bytes()),
                                      timer.seconds());
        }
    }
    /// 2-norm of the whole model's gradient, after sum_gradients. Collective.
    double gradient_norm(const Mesh& mesh) {
        double squares = 0;
        for (const Placed& p : all_)
            squares +=
                sum_of_squares(std::span<const T>(gradients_).subspan(p.offset, p.size())) / p.copies(mesh);
        return std::sqrt(mesh.along(Axes::all()).all_reduce(squares));
    }

  private:
    Id add(Placed p) {
        all_.push_back(std::move(p));
        return all_.size() - 1;
    }
    /// The different placements, in the order in which they lie.
    std::vector<Axes> kinds() const {
        std::vector<Axes> kinds;
        for (const Placed& p : all_) kinds.push_back(p.split);
        std::ranges::sort(kinds);
        kinds.erase(std::unique(kinds.begin(), kinds.end()), kinds.end());
        return kinds;
    }
    /// First number and numbers of all parameters that are split like this.
    std::pair<std::size_t, std::size_t> run_of(Axes split) const {
        std::size_t first = weights_.size(), n = 0;
        for (const Placed& p : all_)
            if (p.split == split) first = std::min(first, p.offset), n += p.size();
        return {first, n};
    }

    std::vector<Placed> all_;
    std::vector<T> weights_, gradients_;
};

}  // namespace fived
