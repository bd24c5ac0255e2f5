// mpirun -np 4 dp_matmul_mpi                multiplies matrices that are cut over the ranks, and compares with one
// mpirun -np 2 dp_matmul_mpi --benchmark    4096 x 4096 x 4096 in float32
#include <array>
#include <cstdio>
#include <string>
#include <vector>

#include "dp_matmul_mpi.hpp"
#include "fived/lesson/product_lesson.hpp"
#include "matmul_panels.hpp"

namespace {

using namespace fived;

struct Settings : ProductSettings {
    std::size_t most_panels = 32;
    double link = 1;

    Settings() { panels = 2; }
    Options options() {
        Options options("C = A B by MPI, cut over the ranks in four ways. Run it under mpirun.");
        add_to(options, "messages in which a block of C travels in the split `inner`", " of each split");
        options.add("most-panels", most_panels, std::size_t{2}, "of B that are tried");
        options.add("link", link, 0.0,
                    "GB/s of a link to pretend in a second sweep over the panels; 0: no such sweep");
        return options;
    }
};

template <class T>
class Lesson : ProductLesson<Settings> {
  public:
    Lesson(const Communicator& world, const Settings& settings) : ProductLesson(world, settings, 10) {}

    bool run() {
        say("dp_matmul_mpi: C = A B, %zu x %zu x %zu, %s, %d rank(s)\n", s_.rows, s_.inner, s_.columns,
            name_of(s_.dtype), world_.size());
        say_columns();
        const bool right = compare_all();
        times();
        sweep("messages as MPI moves them here", 0);
        if (s_.link > 0 && world_.size() > 1) {
            char title[100];
            std::snprintf(title, sizeof title, "a link that we pretend, %g GB/s", s_.link);
            sweep(title, 1e-9 / s_.link);
        }
        conclude(right, "dp", "dp_matmul_mpi");
        return right;
    }

  private:
    Range my_rows() const { return range(s_.rows, world_.size(), world_.rank()); }

    bool compare_all() {
        const Whole<T> serial = whole<T>();
        bool right = true;
        for (const Split split : values_of<Split>()) {
            SplitProduct<T> product(world_, split, shape_, s_.panels);
            right &= compare(name_of(split), product, serial);
        }
        PanelProduct<T> product(world_, shape_);
        const Matrix<T> a_mK = a<T>(my_rows(), all_inner()), b_KJ = owned_b();
        Matrix<T> c(my_rows().length, s_.columns);
        product.multiply(a_mK, b_KJ, c.view, std::min<std::size_t>(s_.inner, 3));
        return row("broadcast", {difference<T>(world_, serial.c, my_rows(), all_columns(), c), 0, 0},
                   {product.bytes_sent(), product.bytes_by_formula(), 0, 0}, false) &&
               right;
    }
    Matrix<T> owned_b() const {
        return world_.rank() == 0 ? b<T>(all_inner(), all_columns()) : Matrix<T>(0, s_.columns);
    }

    /// Each split beside its own product without communication, and beside one rank.
    void times() {
        Cases cases{{"one rank", on_one_rank<T>()}};
        std::vector<SplitProduct<T>> products;
        std::vector<std::array<Matrix<T>, 4>> pieces;  // a, b, c; a b without communication
        const std::vector<Split> splits = values_of<Split>();
        products.reserve(splits.size()), pieces.reserve(splits.size());
        for (const Split split : splits) {
            const std::string name = name_of(split);
            SplitProduct<T>& product = products.emplace_back(world_, split, shape_, s_.panels);
            Matrix<T> a_ = a<T>(product.rows_of_a(), product.columns_of_a()),
                      b_ = b<T>(product.rows_of_b(), product.columns_of_b());
            Matrix<T> alone(a_.view.rows, b_.view.columns);
            auto& p = pieces.emplace_back(std::array<Matrix<T>, 4>{
                std::move(a_), std::move(b_),
                Matrix<T>(product.rows_of_c().length, product.columns_of_c().length), std::move(alone)});
            cases.emplace_back(name + " alone", [&p] { gemm<T>(p[0], p[1], p[3].view); });
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
        const Matrix<T> a_mK = a<T>(my_rows(), all_inner()), b_KJ = owned_b();
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
};

}  // namespace

int main(int argc, char** argv) {
    return run_mpi_lesson<Settings, Lesson>("dp_matmul_mpi", argc, argv);
}
