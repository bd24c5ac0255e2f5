// The mesh: five axes as one Cartesian communicator, and the communicators along them.
//
//     rank = (((p*dp + d)*ep + e)*sp + s)*tp + t       tp communicates most: innermost
//
//     Mesh mesh(world, {.pp = 2, .dp = 2, .tp = 2});
//     mesh.along(Axis::tp).all_reduce(sums);                  ranks that differ along tp alone
//     mesh.along(token_axes).all_reduce(gradients);           ... along dp, ep and sp
//
// A Line books what its ranks send. An all-reduce of n bytes among P ranks is booked as 2 (P-1)/P n bytes per rank, which
// is what the best algorithms send, as in common/comm/ledger.py.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "fived/error.hpp"
#include "fived/lesson/record.hpp"
#include "fived/mpi/mpi.hpp"
#include "fived/named.hpp"

namespace fived {

enum class Axis { pp, dp, ep, sp, tp };
constexpr auto names(Axis) {
    return std::array{"pp", "dp", "ep", "sp", "tp"};
}

/// A set of axes.
class Axes {
  public:
    constexpr Axes() = default;
    constexpr Axes(Axis axis) : bits_(1u << unsigned(axis)) {}
    constexpr Axes(std::initializer_list<Axis> list) {
        for (const Axis axis : list) bits_ |= Axes(axis).bits_;
    }
    static constexpr Axes all() { return {Axis::pp, Axis::dp, Axis::ep, Axis::sp, Axis::tp}; }

    constexpr bool contains(Axis axis) const { return bits_ & Axes(axis).bits_; }
    constexpr Axes with(Axes others) const {
        Axes all;
        all.bits_ = bits_ | others.bits_;
        return all;
    }
    constexpr Axes without(Axes others) const {
        Axes rest;
        rest.bits_ = bits_ & ~others.bits_;
        return rest;
    }
    constexpr auto operator<=>(const Axes&) const = default;
    /// "dp+ep+sp"; "world" for all five.
    std::string name() const {
        if (*this == all()) return "world";
        std::string name;
        for (const Axis axis : values_of<Axis>()) {
            if (!contains(axis)) continue;
            if (!name.empty()) name += '+';
            name += name_of(axis);
        }
        return name;
    }

  private:
    unsigned bits_ = 0;
};

/// Ranks along these see other tokens.
constexpr Axes token_axes{Axis::dp, Axis::ep, Axis::sp};
/// Ranks along these see other samples.
constexpr Axes sample_axes{Axis::dp, Axis::ep};

struct MeshShape {
    int pp = 1, dp = 1, ep = 1, sp = 1, tp = 1;

    std::array<int, 5> sizes() const { return {pp, dp, ep, sp, tp}; }
    std::int64_t ranks() const { return std::int64_t(pp) * dp * ep * sp * tp; }
    /// "pp=2 dp=1 ep=1 sp=1 tp=2"
    std::string name() const {
        std::string name;
        for (const Axis axis : values_of<Axis>()) {
            if (!name.empty()) name += ' ';
            name += name_of(axis);
            name += '=' + std::to_string(sizes()[int(axis)]);
        }
        return name;
    }
};

/// The ranks along some axes, and what this rank has sent to them.
class Line {
  public:
    explicit Line(Communicator comm) : comm_(std::move(comm)) {}

    const Communicator& comm() const { return comm_; }
    int rank() const { return comm_.rank(); }
    int size() const { return comm_.size(); }

    /// P -> R, in place. A single rank sends nothing.
    template <class T>
    void all_reduce(std::span<T> data, MPI_Op op = MPI_SUM) {
        if (size() == 1) return;
        const Timer timer;
        comm_.all_reduce(data, op);
        book(2 * (size() - 1) * std::int64_t(data.size_bytes()), timer.seconds());
    }
    template <class T>
        requires std::is_arithmetic_v<T>
    T all_reduce(T value, MPI_Op op = MPI_SUM) {
        all_reduce(std::span(&value, 1), op);
        return value;
    }
    /// times_ranks: the bytes that this rank sent, times the ranks of the line, which is a whole number.
    void book(std::int64_t times_ranks, double seconds) { sent_ += times_ranks, seconds_ += seconds; }
    void forget() { sent_ = 0, seconds_ = 0; }
    std::int64_t sent() const { return sent_; }
    double seconds() const { return seconds_; }

  private:
    Communicator comm_;
    std::int64_t sent_ = 0;
    double seconds_ = 0;
};

/// Bytes that a rank sends, times the ranks of the line, by the line's name. Lines without messages are left out.
using Bytes = std::map<std::string, std::int64_t>;

class Mesh {
  public:
    /// Collective. Throws UsageError where the axes' product is not the number of ranks.
    Mesh(const Communicator& world, const MeshShape& shape) : shape_(shape) {
        for (const int size : shape.sizes())
            if (size < 1) throw UsageError("mesh " + shape.name() + " has an axis without ranks");
        if (shape.ranks() != world.size())
            throw UsageError("mesh " + shape.name() + " needs " + std::to_string(shape.ranks()) +
                             " ranks, the world has " + std::to_string(world.size()));
        const std::array<int, 5> sizes = shape.sizes(), once{};
        MPI_Comm grid = MPI_COMM_NULL;
        world.check(MPI_Cart_create(world.handle(), 5, sizes.data(), once.data(), 0, &grid),
                    "MPI_Cart_create");
        MPI_Cart_coords(grid, world.rank(), 5, at_.data());
        for (const Axes axes :
             {Axes(Axis::pp), Axes(Axis::dp), Axes(Axis::ep), Axes(Axis::sp), Axes(Axis::tp), sample_axes,
              token_axes, token_axes.with(Axis::tp), token_axes.without(Axis::ep),
              token_axes.without(Axis::ep).with(Axis::tp), Axes::all()})
            lines_.emplace(axes, std::make_unique<Line>(part_of(world, grid, axes)));
        MPI_Comm_free(&grid);
    }

    const MeshShape& shape() const { return shape_; }
    int size(Axis axis) const { return shape_.sizes()[int(axis)]; }
    /// This rank's coordinate.
    int at(Axis axis) const { return at_[int(axis)]; }
    Line& along(Axes axes) const { return *lines_.at(axes); }
    const std::map<Axes, std::unique_ptr<Line>>& lines() const { return lines_; }

    void forget() const {
        for (const auto& [_, line] : lines_) line->forget();
    }
    /// What this rank has sent since forget().
    Bytes sent() const {
        Bytes bytes;
        for (const auto& [axes, line] : lines_)
            if (line->sent() > 0) bytes[axes.name()] = line->sent();
        return bytes;
    }
    double seconds() const {
        double sum = 0;
        for (const auto& [_, line] : lines_) sum += line->seconds();
        return sum;
    }

  private:
    static Communicator part_of(const Communicator& world, MPI_Comm grid, Axes axes) {
        std::array<int, 5> kept{};
        for (const Axis axis : values_of<Axis>()) kept[int(axis)] = axes.contains(axis);
        MPI_Comm part = MPI_COMM_NULL;
        world.check(MPI_Cart_sub(grid, kept.data(), &part), "MPI_Cart_sub");
        Communicator line(part, axes.name());
        MPI_Comm_free(&part);
        return line;
    }

    MeshShape shape_;
    std::array<int, 5> at_{};
    std::map<Axes, std::unique_ptr<Line>> lines_;
};

}  // namespace fived
