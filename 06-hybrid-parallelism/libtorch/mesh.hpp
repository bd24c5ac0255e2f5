// The five axes, and the ranks that communicate along them: common/comm/mesh.py.
//
//     rank = (((p*dp + d)*ep + e)*sp + s)*tp + t             tp communicates most: innermost
//
//     mesh.along({Axis::tp})     mesh.along({Axis::dp, Axis::ep, Axis::sp})      one axis; the product of several
#pragma once

#include <array>
#include <functional>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "fived/named.hpp"
#include "fived/torch/ranks.hpp"

namespace fived {

enum class Axis { pp, dp, ep, sp, tp };
constexpr auto names(Axis) {
    return std::array{"pp", "dp", "ep", "sp", "tp"};
}
using Axes = std::set<Axis>;
const Axes every_axis{Axis::pp, Axis::dp, Axis::ep, Axis::sp, Axis::tp};
const Axes token_axes{Axis::dp, Axis::ep, Axis::sp};  ///< along which each rank sees other tokens

/// "dp+ep"; of all five "world".
std::string words(const Axes& axes);

/// A group of ranks that a mesh asks for: those that differ along `axes` alone.
struct GroupOf {
    Axes axes;
    std::vector<int> places;  ///< these of a single axis; empty: all
    std::string purpose;      ///< tells apart groups of the same ranks
    std::vector<int> ranks;   ///< of the world, in order; empty on a rank that is none of them

    std::string name() const;
};
using MakeGroup = std::function<Group(const GroupOf&)>;

class Mesh {
  public:
    using Shape = std::array<int, 5>;

    /// rank: in the world, which has as many ranks as the product of `shape`. make(group): called on all ranks, in the same
    /// order, for every group of at least 2 ranks. Throws std::invalid_argument for a size below 1, and for a rank outside.
    Mesh(const Shape& shape, int rank, MakeGroup make) : shape_(shape), rank_(rank), make_(std::move(make)) {
        for (const int size : shape_)
            if (size < 1) throw std::invalid_argument("a mesh has at least one rank along each axis");
        if (rank < 0 || rank >= ranks())
            throw std::invalid_argument("rank " + std::to_string(rank) + " is outside of a mesh of " +
                                        std::to_string(ranks()) + " ranks");
    }

    const Shape& shape() const { return shape_; }
    int size(Axis axis) const { return shape_[std::size_t(axis)]; }
    int ranks() const;
    /// This rank's coordinate.
    int at(Axis axis) const;
    /// The ranks that differ from this one along `axes` alone. All ranks make these calls in the same order.
    const RanksPtr& along(const Axes& axes, const std::string& purpose = "") {
        return make({axes, {}, purpose, {}}).ranks;
    }
    /// The process group behind; null for one rank.
    const Group& group(const Axes& axes) { return make({axes, {}, "", {}}).group; }
    /// Those at `places` of an axis; null on others. All ranks make this call.
    RanksPtr part(Axis axis, const std::vector<int>& places, const std::string& purpose) {
        return make({{axis}, places, purpose, {}}).ranks;
    }

    /// Messages since the last call, by the axes of their group, with the number of its ranks.
    struct Sent {
        std::string axes;
        int ranks;
        Message message;
    };
    std::vector<Sent> take_messages();

  private:
    struct Made {
        RanksPtr ranks;  // null on a rank that is not in it
        Group group;
        std::string axes;
    };
    Made& make(GroupOf group);

    Shape shape_;
    int rank_;
    MakeGroup make_;
    std::map<std::string, Made> groups_;                              // by name, with the purpose
    std::map<std::pair<std::vector<int>, std::string>, Group> made_;  // by ranks and purpose
};

}  // namespace fived
