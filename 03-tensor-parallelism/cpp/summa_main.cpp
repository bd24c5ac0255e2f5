// mpirun -np 4 tp_summa_mpi                multiplies matrices cut over a grid of ranks, and compares with one
// mpirun -np 2 tp_summa_mpi --benchmark    4096 x 4096 x 4096 in float32
#include <charconv>
#include <cstdio>
#include <string>
#include <vector>

#include "fived/lesson/product_lesson.hpp"
#include "tp_summa_mpi.hpp"

namespace {

using namespace fived;

struct Settings : ProductSettings {
    std::string grid = "most square";
    GridShape shape;  // of the grid, once it is settled

    Options options() {
        Options options("C = A B by MPI on a grid of ranks (SUMMA). Run it under mpirun.");
        options.add("grid", grid, "of ranks, such as 2x3");
        add_to(options, "panels in which a block is broadcast", " of each version");
        return options;
    }
    /// Raises UsageError unless the grid is of `ranks`.
    void check(int ranks) {
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
class Lesson : ProductLesson<Settings> {
  public:
    Lesson(const Communicator& world, const Settings& settings) : ProductLesson(world, settings, 16) {
        versions_ = {{"mpi", Carrier::mpi, false}, {"mpi overlapped", Carrier::mpi, true}};
        if (one_host(world)) {
            versions_.push_back({"host", Carrier::host, false});
            versions_.push_back({"host overlapped", Carrier::host, true});
        }
    }

    bool run() {
        say("tp_summa_mpi: C = A B, %zu x %zu x %zu, %s, %d x %d ranks\n", s_.rows, s_.inner, s_.columns,
            name_of(s_.dtype), s_.shape.rows, s_.shape.columns);
        say_columns();
        const Whole<T> serial = whole<T>();
        bool right = true;
        for (const Version& version : versions_) {
            Summa<T> ours = product(version);
            right &= compare(version.name, ours, serial);
        }
        times();
        conclude(right, "tp", "tp_summa_mpi");
        return right;
    }

  private:
    struct Version {
        std::string name;
        Carrier carrier;
        bool overlap;
    };

    Summa<T> product(const Version& v) const {
        return {world_, s_.shape, shape_, s_.panels, v.carrier, v.overlap};
    }

    /// Each version beside a rank's share of the product without communication, and beside one rank.
    void times() {
        std::vector<Summa<T>> products;
        products.reserve(versions_.size());
        for (const Version& version : versions_) products.push_back(product(version));
        const Summa<T>& first = products.front();
        const Range rows = first.rows_of_c(), columns = first.columns_of_c();
        const Matrix<T> row_of_a = a<T>(rows, all_inner()), column_of_b = b<T>(all_inner(), columns),
                        a_ = a<T>(rows, first.columns_of_a()), b_ = b<T>(first.rows_of_b(), columns);
        Matrix<T> alone(rows.length, columns.length), c(rows.length, columns.length);
        Cases cases{{"one rank", on_one_rank<T>()},
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

    std::vector<Version> versions_;
};

}  // namespace

int main(int argc, char** argv) {
    return run_mpi_lesson<Settings, Lesson>("tp_summa_mpi", argc, argv);
}
