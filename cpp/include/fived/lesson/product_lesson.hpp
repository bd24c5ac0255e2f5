// What lessons that multiply cut matrices share: their command line, matrices made piece by piece, comparison, timing in
// turn, record.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fived/lesson/equality.hpp"
#include "fived/lesson/lesson.hpp"
#include "fived/math/blas.hpp"
#include "fived/math/matrix.hpp"
#include "fived/math/product.hpp"
#include "fived/math/random.hpp"

namespace fived {

struct ProductSettings : LessonSettings {
    std::size_t rows = 211, inner = 190, columns = 167, panels = 1;

    /// What --benchmark starts from.
    void prefer_benchmark() {
        rows = inner = columns = 4096;
        dtype = Dtype::float32;
    }
    void add_to(Options& options, const std::string& panels_are, const std::string& each) {
        options.add("rows", rows, std::size_t{1}, "of A and C");
        options.add("inner", inner, std::size_t{1}, "columns of A and rows of B");
        options.add("columns", columns, std::size_t{1}, "of B and C");
        options.add("panels", panels, std::size_t{1}, panels_are);
        LessonSettings::add_to(options, "rounds that are timed", "of the matrices", each,
                               "larger matrices; with --help: the defaults");
    }
    void check(int) const {}
};

/// A matrix that owns its numbers.
template <class T>
struct Matrix {
    std::vector<T> numbers;
    MatrixView<T> view;

    Matrix(std::size_t rows, std::size_t columns)
        : numbers(rows * columns), view(numbers.data(), rows, columns) {}
    Matrix(Matrix&&) = default;  // the vector keeps its memory
    /// Rows and columns of a whole matrix of numbers by position, uniform in [-1, 1).
    Matrix(Range rows, Range columns, std::size_t whole_columns, std::uint64_t seed)
        : Matrix(rows.length, columns.length) {
        for (std::size_t i = 0; i < rows.length; ++i)
            for (std::size_t j = 0; j < columns.length; ++j)
                view(i, j) =
                    T(2 * uniform(seed, 0, (rows.begin + i) * whole_columns + columns.begin + j) - 1);
    }
    operator MatrixView<const T>() const { return view; }
    operator Factor<T>() const { return MatrixView<const T>(view); }
};

/// Of this rank's piece x = whole[rows, columns] and y, the largest of all ranks. Collective.
template <class T>
double difference(const Communicator& world, const Matrix<T>& whole, Range rows, Range columns,
                  MatrixView<const T> y) {
    std::vector<Compared> one(1);
    for (std::size_t i = 0; i < rows.length; ++i)
        for (std::size_t j = 0; j < columns.length; ++j)
            one[0].include(double(whole.view(rows.begin + i, columns.begin + j)), double(y(i, j)));
    return largest_difference(world, one, 0).value;
}

/// Seconds of each round.
struct Timed {
    std::string name;
    std::vector<double> seconds;
    std::size_t counted = 0, formula = 0;  // bytes
};
using Cases = std::vector<std::pair<std::string, std::function<void()>>>;

/// Seconds of the slowest rank in each round; all cases in turn, after a round that does not count. Collective.
inline std::vector<Timed> in_turn(const Communicator& world, const Cases& cases, int rounds) {
    std::vector<Timed> timed;
    for (const auto& [name, call] : cases) timed.push_back({name, {}});
    for (int round = -1; round < rounds; ++round)
        for (std::size_t i = 0; i < cases.size(); ++i) {
            world.barrier();
            const Timer timer;
            cases[i].second();
            const double seconds = world.all_reduce(timer.seconds(), MPI_MAX);
            if (round >= 0) timed[i].seconds.push_back(seconds);
        }
    return timed;
}

/// C = A B, dA = dC B^T and dB = A^T dC; what `Product` computes in pieces is compared with the serial product.
template <class Settings>
class ProductLesson : protected LessonBase<Settings> {
  protected:
    using Base = LessonBase<Settings>;
    using Base::s_, Base::say, Base::world_;

    template <class T>
    struct Whole {
        Matrix<T> c, da, db;
    };

    ProductLesson(const Communicator& world, const Settings& settings, int width)
        : Base(world, settings), shape_{settings.rows, settings.inner, settings.columns}, width_(width) {}

    /// Pieces of the matrices.
    template <class T>
    Matrix<T> a(Range rows, Range columns) const {
        return {rows, columns, s_.inner, 3 * s_.seed};
    }
    template <class T>
    Matrix<T> b(Range rows, Range columns) const {
        return {rows, columns, s_.columns, 3 * s_.seed + 1};
    }
    template <class T>
    Matrix<T> dc(Range rows, Range columns) const {
        return {rows, columns, s_.columns, 3 * s_.seed + 2};
    }
    Range all_rows() const { return {0, s_.rows}; }
    Range all_inner() const { return {0, s_.inner}; }
    Range all_columns() const { return {0, s_.columns}; }

    /// The serial product, which every rank computes.
    template <class T>
    Whole<T> whole() const {
        const Matrix<T> a_MK = a<T>(all_rows(), all_inner()), b_KJ = b<T>(all_inner(), all_columns()),
                        dc_MJ = dc<T>(all_rows(), all_columns());
        Whole<T> whole{{s_.rows, s_.columns}, {s_.rows, s_.inner}, {s_.inner, s_.columns}};
        gemm<T>(a_MK, b_KJ, whole.c.view);
        gemm<T>(dc_MJ, t(b_KJ.view), whole.da.view);
        gemm<T>(t(a_MK.view), dc_MJ, whole.db.view);
        return whole;
    }
    void say_columns() const {
        say("\nlargest relative difference from one device, and bytes that all ranks sent\n"
            "%-*s %8s %8s %8s  %14s %14s  %14s %14s\n",
            width_, "", "C", "dA", "dB", "forward", "by formula", "backward", "by formula");
    }
    /// Multiplies and goes back with this rank's pieces.
    template <class T, class Product>
    bool compare(const std::string& name, Product& p, const Whole<T>& whole) {
        const Matrix<T> a_ = a<T>(p.rows_of_a(), p.columns_of_a()),
                        b_ = b<T>(p.rows_of_b(), p.columns_of_b()),
                        dc_ = dc<T>(p.rows_of_c(), p.columns_of_c());
        Matrix<T> c(dc_.view.rows, dc_.view.columns), da(a_.view.rows, a_.view.columns),
            db(b_.view.rows, b_.view.columns);
        p.multiply(a_, b_, c.view);
        const std::size_t forward = p.bytes_sent();
        p.gradients(a_, b_, dc_, da.view, db.view);
        return row(name,
                   {difference<T>(world_, whole.c, p.rows_of_c(), p.columns_of_c(), c),
                    difference<T>(world_, whole.da, p.rows_of_a(), p.columns_of_a(), da),
                    difference<T>(world_, whole.db, p.rows_of_b(), p.columns_of_b(), db)},
                   {forward, p.bytes_forward(), p.bytes_sent(), p.bytes_backward()}, true);
    }
    bool row(const std::string& name, const std::array<double, 3>& apart, std::array<std::uint64_t, 4> bytes,
             bool backward) {
        const bool agree = this->everywhere(bytes[0] == bytes[1] && bytes[2] == bytes[3]);
        world_.all_reduce(std::span<std::uint64_t>(bytes));
        say("%-*s %8.1e ", width_, name.c_str(), apart[0]);
        if (backward)
            say("%8.1e %8.1e  %14llu %14llu  %14llu %14llu\n", apart[1], apart[2], bytes[0], bytes[1],
                bytes[2], bytes[3]);
        else
            say("%8s %8s  %14llu %14llu\n", "", "", bytes[0], bytes[1]);
        return this->within(name, "", this->tolerance(), {apart[0], apart[1], apart[2]}) && agree;
    }
    /// The whole product on rank 0; nothing on the others.
    template <class T>
    std::function<void()> on_one_rank() const {
        if (world_.rank() > 0) return [] {};
        const auto a_MK = std::make_shared<Matrix<T>>(a<T>(all_rows(), all_inner())),
                   b_KJ = std::make_shared<Matrix<T>>(b<T>(all_inner(), all_columns())),
                   c_MJ = std::make_shared<Matrix<T>>(s_.rows, s_.columns);
        return [=] { gemm<T>(*a_MK, *b_KJ, c_MJ->view); };
    }
    /// The last line, and the record of what was timed.
    void conclude(bool right, const std::string& strategy, const std::string& program) const {
        say(right
                ? "\nproved: C, dA and dB on %d rank(s) equal the serial ones, bytes counted = formula.\n"
                : "\nWRONG: C, dA or dB on %d rank(s) differ from the serial ones, or bytes counted from the "
                  "formula.\n",
            world_.size());
        for (const Timed& timed : timed_) {
            Record line = this->record(strategy, program + ", " + timed.name, timed.name);
            line.add("model", "matrix product " + std::to_string(s_.rows) + " x " + std::to_string(s_.inner) +
                                  " x " + std::to_string(s_.columns));
            line.add("parameters", s_.inner * s_.columns).add("tokens_per_step", s_.rows);
            line.add("flop_per_step", shape_.flop()).add("step_seconds", timed.seconds);
            line.add("communication_seconds", nullptr);
            this->append(line.add("bytes_counted", timed.counted).add("bytes_formula", timed.formula));
        }
    }

    const Shape shape_;
    const int width_;  // of the names in the table
    std::vector<Timed> timed_;
};

}  // namespace fived
