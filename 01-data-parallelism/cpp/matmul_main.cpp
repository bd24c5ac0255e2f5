// mpirun -np 4 dp_matmul_mpi                multiplies matrices that are cut over the ranks, and compares with one
// mpirun -np 2 dp_matmul_mpi --benchmark    4096 x 4096 x 4096 in float32
#include <array>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "dp_matmul_mpi.hpp"
#include "fived/lesson.hpp"
#include "fived/record.hpp"
#include "matmul_panels.hpp"

namespace {

using namespace fived;

struct Settings {
    std::size_t rows = 211, inner = 190, columns = 167, panels = 2, most_panels = 32;
    int steps = 5;
    std::uint64_t seed = 0;
    double link = 1;
    std::string dtype = "float64", json;
    bool benchmark = false;

    /// What --benchmark starts from.
    void prefer_benchmark() {
        rows = inner = columns = 4096;
        dtype = "float32";
    }
    Options options() {
        Options options("C = A B by MPI, cut over the ranks in four ways. Run it under mpirun.");
        options.add("rows", rows, std::size_t{1}, "of A and C");
        options.add("inner", inner, std::size_t{1}, "columns of A and rows of B");
        options.add("columns", columns, std::size_t{1}, "of B and C");
        options.add("panels", panels, std::size_t{1},
                    "messages in which a block of C travels in the split `inner`");
        options.add("most-panels", most_panels, std::size_t{2}, "of B that are tried");
        options.add("link", link, 0.0,
                    "GB/s of a link to pretend in a second sweep over the panels; 0: no such sweep");
        options.add("steps", steps, 1, "rounds that are timed");
        options.add("seed", seed, std::uint64_t{0}, "of the matrices");
        options.add("dtype", dtype, {"float64", "float32"}, "arithmetic");
        options.add("json", json, "append a record of each split to this file");
        options.flag("benchmark", benchmark, "larger matrices; with --help: the defaults");
        return options;
    }
};

template <class T>
class Lesson {
  public:
    Lesson(const Communicator& world, const Settings& settings)
        : world_(world), s_(settings), shape_{settings.rows, settings.inner, settings.columns} {}

    bool run() {
        say("dp_matmul_mpi: C = A B, %zu x %zu x %zu, %s, %d rank(s)\n", s_.rows, s_.inner, s_.columns,
            s_.dtype.c_str(), world_.size());
        make_whole();
        say("\nlargest relative difference from the serial product, and bytes that all ranks sent\n"
            "%-10s %8s %8s %8s  %14s %14s  %14s %14s\n",
            "", "C", "dA", "dB", "forward", "by formula", "backward", "by formula");
        bool right = true;
        for (const auto& [split, name] : splits) right &= compare(split, name);
        right &= compare_panels();
        times();
        sweep("messages as MPI moves them here", 0);
        if (s_.link > 0 && world_.size() > 1) {
            char title[100];
            std::snprintf(title, sizeof title, "a link that we pretend, %g GB/s", s_.link);
            sweep(title, 1e-9 / s_.link);
        }
        say("\n%s: C, dA and dB on %d rank(s) %s the serial ones, bytes counted %s formula.\n",
            right ? "Proved" : "WRONG", world_.size(), right ? "equal" : "differ from, or are not sent as,",
            right ? "=" : "or !=");
        if (!s_.json.empty() && world_.rank() == 0)
            for (const Timed& timed : timed_) record(timed, right).append_to(s_.json);
        return right;
    }

  private:
    static constexpr std::array<std::pair<Split, const char*>, 3> splits{
        {{Split::rows, "rows"}, {Split::columns, "columns"}, {Split::inner, "inner"}}};
    template <class... Values>
    void say(const char* format, Values... values) const {
        if (world_.rank() == 0) std::printf(format, values...), std::fflush(stdout);
    }
    // Sums in another order, nothing else.
    static constexpr double tolerance() { return sizeof(T) == 8 ? 1e-12 : 1e-5; }

    Matrix<T> a(Range rows, Range columns) const { return {rows, columns, s_.inner, 3 * s_.seed}; }
    Matrix<T> b(Range rows, Range columns) const { return {rows, columns, s_.columns, 3 * s_.seed + 1}; }
    Matrix<T> dc(Range rows, Range columns) const { return {rows, columns, s_.columns, 3 * s_.seed + 2}; }
    Range all_rows() const { return {0, s_.rows}; }
    Range all_inner() const { return {0, s_.inner}; }
    Range all_columns() const { return {0, s_.columns}; }
    Range my_rows() const { return range(s_.rows, world_.size(), world_.rank()); }

    /// The serial product on every rank, what all else is compared with.
    void make_whole() {
        const Matrix<T> a_MK = a(all_rows(), all_inner()), b_KJ = b(all_inner(), all_columns()),
                        dc_MJ = dc(all_rows(), all_columns());
        gemm<T>(a_MK, b_KJ, c_.view);
        gemm<T>(dc_MJ, t(b_KJ.view), da_.view);
        gemm<T>(t(a_MK.view), dc_MJ, db_.view);
    }

    bool row(const char* name, std::array<double, 3> apart, std::array<std::size_t, 4> bytes, bool backward) {
        world_.all_reduce(std::span<double>(apart), MPI_MAX);
        const bool agree = world_.all_reduce(int(bytes[0] == bytes[1] && bytes[2] == bytes[3]), MPI_MIN);
        std::array<std::uint64_t, 4> total;
        std::ranges::copy(bytes, total.begin());
        world_.all_reduce(std::span<std::uint64_t>(total));
        say("%-10s %8.1e ", name, apart[0]);
        if (backward)
            say("%8.1e %8.1e  %14llu %14llu  %14llu %14llu\n", apart[1], apart[2], total[0], total[1],
                total[2], total[3]);
        else
            say("%8s %8s  %14llu %14llu\n", "", "", total[0], total[1]);
        const double largest = std::max({apart[0], apart[1], apart[2]});
        largest_ = std::max(largest_, largest);
        return agree && largest <= tolerance();
    }

    bool compare(Split split, const char* name) {
        SplitProduct<T> product(world_, split, shape_, s_.panels);
        const Matrix<T> a_ = a(product.rows_of_a(), product.columns_of_a()),
                        b_ = b(product.rows_of_b(), product.columns_of_b()),
                        dc_ = dc(product.rows_of_c(), product.columns_of_c());
        Matrix<T> c(dc_.view.rows, dc_.view.columns), da(a_.view.rows, a_.view.columns),
            db(b_.view.rows, b_.view.columns);
        product.multiply(a_, b_, c.view);
        const std::size_t forward = product.bytes_sent();
        product.gradients(a_, b_, dc_, da.view, db.view);
        return row(name,
                   {difference<T>(c_, product.rows_of_c(), product.columns_of_c(), c),
                    difference<T>(da_, product.rows_of_a(), product.columns_of_a(), da),
                    difference<T>(db_, product.rows_of_b(), product.columns_of_b(), db)},
                   {forward, product.bytes_forward(), product.bytes_sent(), product.bytes_backward()}, true);
    }

    bool compare_panels() {
        PanelProduct<T> product(world_, shape_);
        const Matrix<T> a_mK = a(my_rows(), all_inner()), b_KJ = owned_b();
        Matrix<T> c(my_rows().length, s_.columns);
        product.multiply(a_mK, b_KJ, c.view, std::min<std::size_t>(s_.inner, 3));
        return row("broadcast", {difference<T>(c_, my_rows(), all_columns(), c), 0, 0},
                   {product.bytes_sent(), product.bytes_by_formula(), 0, 0}, false);
    }
    Matrix<T> owned_b() const {
        return world_.rank() == 0 ? b(all_inner(), all_columns()) : Matrix<T>(0, s_.columns);
    }

    /// Each split beside its own product without communication, and beside one rank.
    void times() {
        const bool one = world_.rank() == 0;
        const Matrix<T> a_MK = one ? a(all_rows(), all_inner()) : Matrix<T>(0, 0),
                        b_KJ = one ? b(all_inner(), all_columns()) : Matrix<T>(0, 0);
        Matrix<T> c_MJ(one ? s_.rows : 0, one ? s_.columns : 0);
        Cases cases{{"one rank", [&] { gemm<T>(a_MK, b_KJ, c_MJ.view); }}};
        std::vector<SplitProduct<T>> products;
        std::vector<std::array<Matrix<T>, 4>> pieces;  // a, b, c; a b without communication
        products.reserve(splits.size()), pieces.reserve(splits.size());
        for (const auto& [split, name] : splits) {
            SplitProduct<T>& product = products.emplace_back(world_, split, shape_, s_.panels);
            Matrix<T> a_ = a(product.rows_of_a(), product.columns_of_a()),
                      b_ = b(product.rows_of_b(), product.columns_of_b());
            Matrix<T> alone(a_.view.rows, b_.view.columns);
            auto& p = pieces.emplace_back(std::array<Matrix<T>, 4>{
                std::move(a_), std::move(b_),
                Matrix<T>(product.rows_of_c().length, product.columns_of_c().length), std::move(alone)});
            cases.emplace_back(std::string(name) + " alone", [&p] { gemm<T>(p[0], p[1], p[3].view); });
            cases.emplace_back(name, [&p, &product] { product.multiply(p[0], p[1], p[2].view); });
        }
        const std::vector<Timed> timed = in_turn(world_, cases, s_.steps);
        const std::vector<double>& one_rank = timed[0].seconds;
        const double peak = shape_.flop() / *std::ranges::min_element(one_rank);
        say("\n%d rounds in turn, ms; one rank alone %.1f, %.0f GFLOP/s\n%-10s %8s %8s %7s %7s %9s %8s %9s\n",
            s_.steps, median(one_rank) * 1e3, peak / 1e9, "", "ms", "alone", "ratio", "best", "GFLOP/s",
            "of peak", "speed-up");
        for (std::size_t i = 1; i < timed.size(); i += 2) {
            const std::vector<double>&alone = timed[i].seconds, &ours = timed[i + 1].seconds;
            const double speed = shape_.flop() / median(ours);
            say("%-10s %8.1f %8.1f %7.3f %7.3f %9.1f %7.0f%% %9.2f\n", timed[i + 1].name.c_str(),
                median(ours) * 1e3, median(alone) * 1e3, ratio(ours, alone),
                *std::ranges::min_element(ours) / *std::ranges::min_element(alone), speed / 1e9,
                100 * speed / peak / world_.size(), ratio(one_rank, ours));
            timed_.push_back(timed[i + 1]);
            timed_.back().counted = products[i / 2].bytes_sent();
            timed_.back().formula = products[i / 2].bytes_forward();
        }
    }

    /// Times every number of panels beside the closed form, whose three times are measured here, too.
    void sweep(const char* title, double seconds_a_byte) {
        using Parts = typename PanelProduct<T>::Parts;
        PanelProduct<T> product(world_, shape_);
        const Matrix<T> a_mK = a(my_rows(), all_inner()), b_KJ = owned_b();
        Matrix<T> c(my_rows().length, s_.columns);
        const std::size_t most = std::min(s_.most_panels, s_.inner);
        Cases cases;
        const auto add = [&](std::size_t n, Parts parts) {
            cases.emplace_back(
                "", [&, n, parts] { product.multiply(a_mK, b_KJ, c.view, n, seconds_a_byte, parts); });
        };
        add(1, Parts::product), add(1, Parts::messages);
        add(most, Parts::product), add(most, Parts::messages);
        std::vector<std::size_t> counts;
        for (std::size_t n = 1; n <= most; n = std::max(n + 1, n * 3 / 2)) counts.push_back(n);
        for (const std::size_t n : counts) add(n, Parts::both);
        const std::vector<Timed> timed = in_turn(world_, cases, s_.steps);
        const auto seconds = [&](std::size_t i) { return median(timed[i].seconds); };
        PanelTimes times{seconds(0), seconds(1), 0};
        if (most > 1)
            times.overhead =
                std::max(0.0, seconds(2) + seconds(3) - times.compute - times.message) / double(most - 1);
        std::size_t fastest = 0;
        for (std::size_t i = 0; i < counts.size(); ++i)
            if (seconds(4 + i) < seconds(4 + fastest)) fastest = i;
        say("\nB passed on in n panels, %s: product %.3f ms, messages %.3f, a panel more %.4f\n     n  "
            "predicted   "
            "measured\n",
            title, times.compute * 1e3, times.message * 1e3, times.overhead * 1e3);
        for (std::size_t i = 0; i < counts.size(); ++i)
            say("%6zu %10.3f %10.3f%s\n", counts[i], times.predicted(double(counts[i])) * 1e3,
                seconds(4 + i) * 1e3, i == fastest ? "  fastest" : "");
        say("best n: predicted %zu, measured %zu\n", times.best(most), counts[fastest]);
    }

    Record record(const Timed& timed, bool right) const {
        Record line;
        line.add("strategy", "dp").add("implementation", "dp_matmul_mpi, " + timed.name);
        line.add("language", "cpp-mpi")
            .add("ranks", world_.size())
            .add("backend", "mpi")
            .add("dtype", s_.dtype);
        line.add("model", "matrix product " + std::to_string(s_.rows) + " x " + std::to_string(s_.inner) +
                              " x " + std::to_string(s_.columns));
        line.add("parameters", s_.inner * s_.columns).add("tokens_per_step", s_.rows);
        line.add("flop_per_step", shape_.flop()).add("steps", s_.steps).add("step_seconds", timed.seconds);
        line.add("communication_seconds", nullptr).add("bytes_counted", timed.counted);
        line.add("bytes_formula", timed.formula).add("peak_memory_bytes", peak_memory_bytes());
        line.add("scaling", "strong").add("equal", right).add("largest_difference", largest_);
        return line;
    }

    const Communicator& world_;
    const Settings& s_;
    Shape shape_;
    Matrix<T> c_{s_.rows, s_.columns}, da_{s_.rows, s_.inner}, db_{s_.inner, s_.columns};
    std::vector<Timed> timed_;
    double largest_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    fived::Environment mpi(argc, argv);
    const Communicator world = Communicator::world();
    Settings settings;
    if (given(argc, argv, "--benchmark")) settings.prefer_benchmark();
    const Options options = settings.options();
    const auto prepare = [&] {
        if (!settings.json.empty() && world.rank() == 0) check_writable(settings.json);
    };
    return run_lesson(world, "dp_matmul_mpi", argc, argv, options, prepare, [&] {
        if (world.size() > 1) set_blas_threads(1);
        return settings.dtype == "float64" ? Lesson<double>(world, settings).run()
                                           : Lesson<float>(world, settings).run();
    });
}
