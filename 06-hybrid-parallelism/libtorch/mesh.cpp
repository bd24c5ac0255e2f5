#include "mesh.hpp"

#include <algorithm>
#include <functional>
#include <numeric>

namespace fived {

namespace {

int coordinate(const Mesh::Shape& shape, int rank, Axis axis) {
    for (std::size_t inner = shape.size() - 1; inner > std::size_t(axis); --inner) rank /= shape[inner];
    return rank % shape[std::size_t(axis)];
}

}  // namespace

std::string words(const Axes& axes) {
    if (axes == every_axis) return "world";
    std::string text;
    for (const Axis axis : axes) {
        if (!text.empty()) text += '+';
        text += name_of(axis);
    }
    return text;
}

std::string GroupOf::name() const {
    std::string text = words(axes) + purpose;
    for (const int place : places) (text += ' ') += std::to_string(place);
    return text;
}

int Mesh::ranks() const {
    return std::accumulate(shape_.begin(), shape_.end(), 1, std::multiplies<>());
}

int Mesh::at(Axis axis) const {
    return coordinate(shape_, rank_, axis);
}

Mesh::Made& Mesh::make(GroupOf group) {
    const std::string name = group.name();
    if (const auto found = groups_.find(name); found != groups_.end()) return found->second;
    std::int64_t size = group.places.empty() ? 1 : std::int64_t(group.places.size());
    for (const Axis axis : group.axes)
        if (group.places.empty()) size *= this->size(axis);
    for (int r = 0; r < ranks(); ++r) {
        const bool beside = std::ranges::all_of(every_axis, [&](Axis axis) {
            return group.axes.contains(axis) || coordinate(shape_, r, axis) == at(axis);
        });
        const auto chosen = [&](int place) { return std::ranges::count(group.places, place) > 0; };
        if (beside && (group.places.empty() || chosen(coordinate(shape_, r, *group.axes.begin()))))
            group.ranks.push_back(r);
    }
    const bool member = std::ranges::count(group.ranks, rank_) > 0;
    if (!member) group.ranks.clear();
    const auto key = std::pair(group.ranks, group.purpose);
    if (size > 1 && !made_.contains(key)) made_[key] = make_(group);
    const Group made = size > 1 ? made_[key] : Group();
    return groups_[name] = {member ? c10::make_intrusive<Ranks>(made) : RanksPtr(), made, words(group.axes)};
}

std::vector<Mesh::Sent> Mesh::take_messages() {
    std::vector<Sent> all;
    for (const auto& [_, made] : groups_)
        if (made.ranks)
            for (Message& message : made.ranks->take_messages())
                all.push_back({made.axes, made.ranks->size(), std::move(message)});
    return all;
}

}  // namespace fived
