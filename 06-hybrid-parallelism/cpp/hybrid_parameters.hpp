// A rank's parameters in flat arrays, each with the description from which all synchronisation follows:
//
//     a gradient is summed over exactly the axes along which tokens are split and its parameter is replicated;
//     a parameter counts once in the gradient norm.
//
//     parameter                    split along        gradient summed over      copies, for the norm
//     norm, bias after a sum       pp                 dp ep sp                  dp ep sp tp
//     q k v, up; o, down           pp tp              dp ep sp                  dp ep sp
//     embedding                    pp tp, but tied    dp ep sp, then its two    dp ep sp, and the two holders
//     up, down of experts          pp ep tp           dp sp                     dp sp
//     router                       pp                 dp ep sp tp               dp ep sp tp
//     bias of experts' down        pp ep              dp sp tp                  dp sp tp
//
// Along tp each rank weights a partial result of the experts, so its gradient of the router is a term of a sum, as that of
// other tokens is; and one rank alone adds the experts' last bias.
//
// Parameters that are split alike lie together, so a sum is one message. Replicas share no message with shards: the
// rounding of a sum depends on a number's position in the message, and replicas must stay equal to the bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fived/math/kernels.hpp"
#include "fived/math/partition.hpp"
#include "fived/math/shard.hpp"
#include "hybrid_mesh.hpp"

namespace fived {

/// Along `axis` a rank holds `part` of dimension `dim`.
struct Cut {
    Axis axis;
    std::size_t dim;
    Range part;
};

/// This rank's part of a parameter.
struct Placed {
    using Sizes = std::vector<std::size_t>;

    std::string name;                 // of the plain model
    Sizes shape, whole_shape, begin;  // of this part, of the whole, and where in it the part begins
    Axes split;                       // ranks along these hold other parts of the model
    Axes tokens;                      // ranks along these use it on other tokens
    bool tied = false;                // the first and the last stage hold it together, on two ranks
    std::size_t offset = 0;           // in the flat arrays

    std::size_t size() const {
        return std::reduce(shape.begin(), shape.end(), std::size_t(1), std::multiplies());
    }
    /// Of element i of this part, the place in the whole parameter.
    std::size_t place(std::size_t i) const {
        std::size_t place = 0, stride = 1;
        for (std::size_t d = shape.size(); d-- > 0; i /= shape[d], stride *= whole_shape[d])
            place += (begin[d] + i % shape[d]) * stride;
        return place;
    }
    /// The rule.
    Axes summed() const { return tokens.without(split); }
    /// Ranks that hold the same numbers.
    int copies(const Mesh& mesh) const {
        int copies = tied ? 2 : 1;
        for (const Axis axis : values_of<Axis>())
            if (!split.contains(axis)) copies *= mesh.size(axis);
        return copies;
    }
    /// Parameters of one kind lie together.
    using Kind = std::pair<Axes, Axes>;
    Kind kind() const { return {split, tokens}; }
};

template <class T>
class Parameters {
  public:
    using Id = std::size_t;

    /// Declares a parameter of a stage, and along which axes it is cut; an axis of one rank cuts nothing.
    Id add(const std::string& name, const Placed::Sizes& whole, const std::vector<Cut>& cuts = {},
           Axes tokens = token_axes) {
        Placed& p =
            all_.emplace_back(Placed{name, whole, whole, Placed::Sizes(whole.size()), Axis::pp, tokens});
        for (const auto& [axis, dim, part] : cuts) {
            if (part.length == whole[dim]) continue;
            p.shape[dim] = part.length, p.begin[dim] = part.begin;
            p.split = p.split.with(axis);
        }
        return all_.size() - 1;
    }
    void tie(Id id) { all_[id].tied = true; }

    /// Lays out what was declared and gives it its initial values. layers: of the whole model.
    void make(std::size_t layers, std::uint64_t seed) {
        std::size_t end = 0;
        for (const Placed::Kind& kind : kinds())
            for (Placed& p : all_)
                if (p.kind() == kind) p.offset = std::exchange(end, end + p.size());
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
    /// The last two dimensions; i: of the matrices of all experts, which one.
    MatrixView<T> matrix(Id id, std::size_t i = 0) { return matrix(weights_, id, i); }
    MatrixView<T> matrix_gradient(Id id, std::size_t i = 0) { return matrix(gradients_, id, i); }

    /// P -> R: every gradient becomes that of the global batch. holders: the ranks of a tied parameter, which is last,
    /// because its two holders must step with the same bits. Collective.
    void sum_gradients(const Mesh& mesh, const Communicator* holders) {
        for (const Placed::Kind& kind : kinds()) {
            const auto [first, n] = run_of(kind);
            const auto& [split, tokens] = kind;
            mesh.along(tokens.without(split)).all_reduce(std::span(gradients_).subspan(first, n));
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
    MatrixView<T> matrix(std::vector<T>& flat, Id id, std::size_t i) const {
        const Placed& p = all_[id];
        const std::size_t rows = p.shape.end()[-2], columns = p.shape.back();
        return {flat.data() + p.offset + i * rows * columns, rows, columns};
    }
    /// The different placements, in the order in which they lie.
    std::vector<Placed::Kind> kinds() const {
        std::vector<Placed::Kind> kinds;
        for (const Placed& p : all_) kinds.push_back(p.kind());
        std::ranges::sort(kinds);
        kinds.erase(std::unique(kinds.begin(), kinds.end()), kinds.end());
        return kinds;
    }
    /// First number and numbers of all parameters of a kind.
    std::pair<std::size_t, std::size_t> run_of(const Placed::Kind& kind) const {
        std::size_t first = weights_.size(), n = 0;
        for (const Placed& p : all_)
            if (p.kind() == kind) first = std::min(first, p.offset), n += p.size();
        return {first, n};
    }

    std::vector<Placed> all_;
    std::vector<T> weights_, gradients_;
};

}  // namespace fived
