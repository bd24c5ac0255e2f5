// mpirun -np 4 tp_summa_mpi                multiplies matrices cut over a grid of ranks, and compares with one
// mpirun -np 2 tp_summa_mpi --benchmark    4096 x 4096 x 4096 in float32
#include <array>
#include <charconv>
#include <cstdio>
#include <string>
#include <vector>

#include "fived/lesson.hpp"
#include "fived/product.hpp"
#include "fived/record.hpp"
#include "tp_summa_mpi.hpp"

namespace {

using namespace fived;

struct Settings {
    std::size_t rows = 211, inner = 190, columns = 167, panels = 1;
    int steps = 5;
    std::uint64_t seed = 0;
    std::string grid = "most square", dtype = "float64", json;
    bool benchmark = false;
    GridShape shape;  // of the grid, once it is settled

    /// What --benchmark starts from.
    void prefer_benchmark() {
        rows = inner = columns = 4096;
        dtype = "float32";
    }
    Options options() {
        Options options("C = A B by MPI on a grid of ranks (SUMMA). Run it under mpirun.");
        options.add("rows", rows, std::size_t{1}, "of A and C");
        options.add("inner", inner, std::size_t{1}, "columns of A and rows of B");
        options.add("columns", columns, std::size_t{1}, "of B and C");
        options.add("grid", grid, "of ranks, such as 2x3");
        options.add("panels", panels, std::size_t{1}, "panels in which a block is broadcast");
        options.add("steps", steps, 1, "rounds that are timed");
        options.add("seed", seed, std::uint64_t{0}, "of the matrices");
        options.add("dtype", dtype, {"float64", "float32"}, "arithmetic");
        options.add("json", json, "append a record of each version to this file");
        options.flag("benchmark", benchmark, "larger matrices; with --help: the defaults");
        return options;
    }
    /// Raises UsageError unless the grid is of `ranks`.
    void settle_grid(int ranks) {
        shape = most_square(ranks);
        if (grid == "most square") return;
        const std::string fits = std::to_string(shape.rows) + "x" + std::to_string(shape.columns);
        const char *const begin = grid.data(), *const end = begin + grid.size();
        const auto [cross, error] = std::from_chars(begin, end, shape.rows);
        if (error != std::errc() || cross == end || *cross != 'x' ||
            std::from_chars(cross + 1, end, shape.columns).ptr != end || shape.rows < 1 || shape.columns < 1)
            throw UsageError("--grid is " + grid + "; it is rows x columns of ranks, such as " + fits);
        if (std::int64_t(shape.rows) * shape.columns != ranks)
            throw UsageError("--grid " + grid + " needs " +
                             std::to_string(std::int64_t(shape.rows) * shape.columns) + " ranks, here are " +
                             std::to_string(ranks) + "; --grid " + fits + " would fit");
    }
};

/// Whether all ranks see the same memory. Collective.
bool one_host(const Communicator& world) {
    MPI_Comm host = MPI_COMM_NULL;
    world.check(MPI_Comm_split_type(world.handle(), MPI_COMM_TYPE_SHARED, world.rank(), MPI_INFO_NULL, &host),
                "MPI_Comm_split_type");
    int ranks = 0;
    MPI_Comm_size(host, &ranks);
    MPI_Comm_free(&host);
    return world.all_reduce(int(ranks == world.size()), MPI_MIN);
}

template <class T>
class Lesson {
  public:
    Lesson(const Communicator& world, const Settings& settings)
        : world_(world), s_(settings), shape_{settings.rows, settings.inner, settings.columns} {
        versions_ = {{"mpi", Carrier::mpi, false}, {"mpi overlapped", Carrier::mpi, true}};
        if (one_host(world)) {
            versions_.push_back({"host", Carrier::host, false});
            versions_.push_back({"host overlapped", Carrier::host, true});
        }
    }

    bool run() {
        say("tp_summa_mpi: C = A B, %zu x %zu x %zu, %s, %d x %d ranks\n", s_.rows, s_.inner, s_.columns,
            s_.dtype.c_str(), s_.shape.rows, s_.shape.columns);
        const bool right = compare_all();
        times();
        say("\n%s: C, dA and dB on %d rank(s) %s the serial ones, bytes counted %s formula.\n",
            right ? "Proved" : "WRONG", world_.size(), right ? "equal" : "differ from, or are not sent as,",
            right ? "=" : "or !=");
        if (!s_.json.empty() && world_.rank() == 0)
            for (const Timed& timed : timed_) record(timed, right).append_to(s_.json);
        return right;
    }

  private:
    struct Version {
        std::string name;
        Carrier carrier;
        bool overlap;
    };

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
    Summa<T> product(const Version& v) const {
        return {world_, s_.shape, shape_, s_.panels, v.carrier, v.overlap};
    }

    /// Every version against the serial product, which every rank computes.
    bool compare_all() {
        const Matrix<T> a_MK = a(all_rows(), all_inner()), b_KJ = b(all_inner(), all_columns()),
                        dc_MJ = dc(all_rows(), all_columns());
        Matrix<T> c(s_.rows, s_.columns), da(s_.rows, s_.inner), db(s_.inner, s_.columns);
        gemm<T>(a_MK, b_KJ, c.view);
        gemm<T>(dc_MJ, t(b_KJ.view), da.view);
        gemm<T>(t(a_MK.view), dc_MJ, db.view);
        say("\nlargest relative difference from the serial product, and bytes that all ranks sent\n"
            "%-16s %8s %8s %8s  %14s %14s  %14s %14s\n",
            "", "C", "dA", "dB", "forward", "by formula", "backward", "by formula");
        bool right = true;
        for (const Version& version : versions_) right &= compare(version, c, da, db);
        return right;
    }

    bool compare(const Version& version, const Matrix<T>& c, const Matrix<T>& da, const Matrix<T>& db) {
        Summa<T> p = product(version);
        const Matrix<T> a_ = a(p.rows(), p.inner_of_a()), b_ = b(p.inner_of_b(), p.columns()),
                        dc_ = dc(p.rows(), p.columns());
        Matrix<T> my_c(p.rows().length, p.columns().length), my_da(a_.view.rows, a_.view.columns),
            my_db(b_.view.rows, b_.view.columns);
        p.multiply(a_, b_, my_c.view);
        std::array<std::uint64_t, 4> bytes{p.bytes_sent(), p.bytes_forward(), 0, p.bytes_backward()};
        p.gradients(a_, b_, dc_, my_da.view, my_db.view);
        bytes[2] = p.bytes_sent();
        const bool agree = world_.all_reduce(int(bytes[0] == bytes[1] && bytes[2] == bytes[3]), MPI_MIN);
        world_.all_reduce(std::span<std::uint64_t>(bytes));
        std::array<double, 3> apart{difference<T>(c, p.rows(), p.columns(), my_c),
                                    difference<T>(da, p.rows(), p.inner_of_a(), my_da),
                                    difference<T>(db, p.inner_of_b(), p.columns(), my_db)};
        world_.all_reduce(std::span<double>(apart), MPI_MAX);
        say("%-16s %8.1e %8.1e %8.1e  %14llu %14llu  %14llu %14llu\n", version.name.c_str(), apart[0],
            apart[1], apart[2], bytes[0], bytes[1], bytes[2], bytes[3]);
        const double largest = std::max({apart[0], apart[1], apart[2]});
        largest_ = std::max(largest_, largest);
        return agree && largest <= tolerance();
    }

    /// Each version beside a rank's share of the product without communication, and beside one rank.
    void times() {
        const bool one = world_.rank() == 0;
        const Matrix<T> a_MK = one ? a(all_rows(), all_inner()) : Matrix<T>(0, 0),
                        b_KJ = one ? b(all_inner(), all_columns()) : Matrix<T>(0, 0);
        Matrix<T> c_MJ(one ? s_.rows : 0, one ? s_.columns : 0);
        std::vector<Summa<T>> products;
        products.reserve(versions_.size());
        for (const Version& version : versions_) products.push_back(product(version));
        const Summa<T>& first = products.front();
        const Matrix<T> row_of_a = a(first.rows(), all_inner()),
                        column_of_b = b(all_inner(), first.columns()),
                        a_ = a(first.rows(), first.inner_of_a()), b_ = b(first.inner_of_b(), first.columns());
        Matrix<T> alone(first.rows().length, first.columns().length),
            c(first.rows().length, first.columns().length);
        Cases cases{{"one rank", [&] { gemm<T>(a_MK, b_KJ, c_MJ.view); }},
                    {"alone", [&] { gemm<T>(row_of_a, column_of_b, alone.view); }}};
        for (std::size_t i = 0; i < versions_.size(); ++i)
            cases.emplace_back(versions_[i].name, [&, i] { products[i].multiply(a_, b_, c.view); });
        const std::vector<Timed> timed = in_turn(world_, cases, s_.steps);
        const auto best = [](const Timed& t) { return *std::ranges::min_element(t.seconds); };
        const Timed &one_rank = timed[0], &ceiling = timed[1];
        const double peak = shape_.flop() / best(one_rank);
        say("\n%d rounds in turn, ms; one rank alone %.1f, %.0f GFLOP/s; alone: a rank's share without "
            "communication\n"
            "%-16s %8s %8s %7s %7s %8s %9s %8s %9s\n",
            s_.steps, median(one_rank.seconds) * 1e3, peak / 1e9, "", "ms", "alone", "ratio", "best",
            "spread", "GFLOP/s", "of peak", "speed-up");
        for (std::size_t i = 2; i < timed.size(); ++i) {
            const double middle = median(timed[i].seconds), speed = shape_.flop() / middle;
            say("%-16s %8.1f %8.1f %7.3f %7.3f %7.0f%% %9.1f %7.0f%% %9.2f\n", timed[i].name.c_str(),
                middle * 1e3, median(ceiling.seconds) * 1e3, ratio(timed[i].seconds, ceiling.seconds),
                best(timed[i]) / best(ceiling),
                100 * (*std::ranges::max_element(timed[i].seconds) - best(timed[i])) / middle, speed / 1e9,
                100 * speed / peak / world_.size(), ratio(one_rank.seconds, timed[i].seconds));
            timed_.push_back(timed[i]);
            timed_.back().counted = products[i - 2].bytes_sent();
            timed_.back().formula = products[i - 2].bytes_forward();
        }
    }

    Record record(const Timed& timed, bool right) const {
        Record line;
        line.add("strategy", "tp").add("implementation", "tp_summa_mpi, " + timed.name);
        line.add("language", "cpp-mpi").add("ranks", world_.size()).add("backend", "mpi");
        line.add("dtype", s_.dtype);
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
    std::vector<Version> versions_;
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
        settings.settle_grid(world.size());
        if (!settings.json.empty() && world.rank() == 0) check_writable(settings.json);
    };
    return run_lesson(world, "tp_summa_mpi", argc, argv, options, prepare, [&] {
        if (world.size() > 1) set_blas_threads(1);
        return settings.dtype == "float64" ? Lesson<double>(world, settings).run()
                                           : Lesson<float>(world, settings).run();
    });
}
