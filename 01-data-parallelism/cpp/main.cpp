// mpirun -np 4 dp_mpi                trains an MLP on real text, on all ranks and on one, and compares them
// mpirun -np 2 dp_mpi --benchmark    times the steps of every strategy in turn
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "dp_mpi.hpp"
#include "dp_mpi_settings.hpp"
#include "fived/lesson/equality.hpp"

namespace {

using namespace fived;

/// Top-k as one process simulates it: the gradients of n ranks one after the other, a memory for each.
template <class T>
class SerialTopK {
  public:
    SerialTopK(int ranks, std::size_t n, double keep) : sum_(n), order_(n), k_(kept(n, keep)) {
        memories_.assign(ranks, std::vector<T>(n));
    }
    /// What is sent of a rank's gradient goes to the sum; the rest stays in its memory.
    void add(int rank, std::span<const T> gradient) {
        std::vector<T>& memory = memories_[rank];
        for (std::size_t i = 0; i < memory.size(); ++i) memory[i] += gradient[i];
        std::iota(order_.begin(), order_.end(), std::size_t{0});
        std::ranges::nth_element(order_, order_.begin() + (k_ - 1), [&](std::size_t i, std::size_t j) {
            const T a = std::abs(memory[i]), b = std::abs(memory[j]);
            return a > b || (a == b && i < j);
        });
        for (std::size_t j = 0; j < k_; ++j) sum_[order_[j]] += std::exchange(memory[order_[j]], T(0));
    }
    void move_sum_to(std::span<T> gradients) {
        std::ranges::copy(sum_, gradients.begin());
        std::ranges::fill(sum_, T(0));
    }

  private:
    std::vector<std::vector<T>> memories_;
    std::vector<T> sum_;
    std::vector<std::size_t> order_;
    std::size_t k_;
};

/// What is timed and counted of one strategy.
template <class T>
struct Version {
    Method method;
    Strategy how;
    DataParallelMlp<T> model;
    AdamW<T> adamw{};
    Sgd sgd{};
    std::vector<double> seconds{}, exposed{};
    std::size_t counted = 0, formula = 0, state = 0, state_formula = 0;
};

template <class T>
class Lesson : LessonBase<Settings> {
  public:
    Lesson(const Communicator& world, const Settings& settings)
        : LessonBase(world, settings), global_(settings.global_batch(world.size())) {}

    bool run() {
        std::vector<Version<T>> versions;
        for (const auto& [method, how] : s_.strategies()) versions.push_back({method, how, parallel(how)});
        Mlp<T>& mlp = versions.front().model.mlp();
        flop_ = mlp.flop_per_sample() * double(global_), parameters_ = mlp.weights().size();
        say("dp_mpi: MLP %s, %zu parameters, %s, %d rank(s), batch %zu, %s (%.1f MB)\n",
            s_.model_name().c_str(), parameters_, name_of(s_.dtype), world_.size(), global_,
            s_.text.name.c_str(), s_.megabytes());
        bool right = true;
        if (!s_.benchmark) right &= prove();
        for (Version<T>& version : versions) right &= count(version);
        measure(versions);
        show(versions);
        if (!s_.benchmark)
            say("\n%s: training on %d rank(s) %s training on one.\n", right ? "proved" : "WRONG",
                world_.size(), right ? "equals" : "differs from");
        for (const Version<T>& version : versions) append(record_of(version));
        return right;
    }

  private:
    DataParallelMlp<T> parallel(const Strategy& how) const { return {s_.sizes(), s_.seed, &world_, how}; }
    /// The part of `rank` of the batch of `step`.
    MlpBatch<T> part(int step, int rank) const {
        return {s_, step, cut(global_, world_.size(), rank), cut(global_, world_.size(), rank + 1)};
    }

    /// Every strategy, by MPI and by our ring, with both optimizers.
    bool prove() {
        say("\nlargest relative difference from one device, %d steps\n%-26s %8s %8s %8s  %s\n", s_.steps, "",
            "loss", "norm", "gradient", "weights");
        bool right = true;
        if (s_.optimizer != OptimizerKind::adamw) right &= prove_with<Sgd>();
        if (s_.optimizer != OptimizerKind::sgd) right &= prove_with<AdamW<T>>();
        if (!s_.versions || s_.versions == Method::topk) show_feedback();
        return right;
    }

    template <class Optimizer>
    bool prove_with() {
        bool right = true;
        for (auto [method, how] : s_.strategies()) {
            const std::string name = name_of(method), kept = how.keep ? name + share(*how.keep) : name;
            right &= compare<Optimizer>(name, kept, how);
            how.reduction = Reduction::ring;
            right &= compare<Optimizer>(name, kept + ", ring", how);
            how.keep = 1, how.reduction = Reduction::overlapped;
            if (method == Method::topk) right &= compare<Optimizer>("topk all", "topk all", how);
        }
        return right;
    }

    /// Trains on all ranks, and serially on every rank, and compares after each step.
    template <class Optimizer>
    bool compare(const std::string& version, const std::string& title, const Strategy& how) {
        const double tolerance = this->tolerance();
        DataParallelMlp<T> ours = parallel(how);
        DataParallelMlp<T> serial(s_.sizes(), s_.seed, nullptr);
        const bool compressed = how.keep && *how.keep < 1;
        SerialTopK<T> topk(world_.size(), compressed ? parameters_ : 1, how.keep.value_or(1));
        Optimizer our_optimizer, serial_optimizer;
        Difference loss, norm, gradient, weight;
        const auto difference = [&](std::span<const T> a, std::span<const T> b) {
            return largest_difference<T>(world_, serial.mlp().parameters(), a, b, tolerance);
        };
        for (int step = 0; step < s_.steps; ++step) {
            const MlpBatch<T> mine = part(step, world_.rank());
            const double our_loss = ours.loss_and_gradients(mine.x_BI, mine.y, global_, s_.micro_batches);
            double serial_loss = 0;
            if (compressed) {
                for (int rank = 0; rank < world_.size(); ++rank) {
                    const MlpBatch<T> theirs = part(step, rank);
                    serial_loss +=
                        serial.loss_and_gradients(theirs.x_BI, theirs.y, global_, s_.micro_batches);
                    topk.add(rank, serial.mlp().gradients());
                }
                topk.move_sum_to(serial.mlp().gradients());
            } else {
                const MlpBatch<T> all(s_, step, 0, global_);
                serial_loss = serial.loss_and_gradients(all.x_BI, all.y, global_);
            }
            loss.include(largest_difference(world_, serial_loss, our_loss));
            norm.include(largest_difference(world_, serial.gradient_norm(), ours.gradient_norm()));
            gradient.include(difference(serial.mlp().gradients(), ours.gather_gradients()));
            ours.step(our_optimizer);
            serial.step(serial_optimizer);
        }
        weight = difference(serial.mlp().weights(), ours.mlp().weights());
        const bool apart = gradient.value > 0 || weight.value > 0;
        const std::string where = "  (" + gradient.name + "; " + weight.name + ")";
        say("%-26s %8.1e %8.1e %8.1e  %.1e%s\n",
            (std::string(title_of(Optimizer::kind)) + ", " + title).c_str(), loss.value, norm.value,
            gradient.value, weight.value, apart ? where.c_str() : "");
        return within(version, name_of(Optimizer::kind), tolerance,
                      {loss.value, norm.value, gradient.value, weight.value});
    }

    /// What error feedback is for: the same training without it, on one batch over and over.
    void show_feedback() {
        const int every = 8, last = 40;
        const MlpBatch<T> mine = part(0, world_.rank());
        const Strategy whole, topk{.keep = s_.keep}, forgetful{.keep = s_.keep, .feedback = false};
        const std::string title = "topk" + share(s_.keep);
        say("\n%-26s", "loss of SGD at step");
        for (int step = 0; step <= last; step += every) say(" %6d", step);
        for (const auto& [name, how] : {std::pair(std::string("all-reduce"), whole),
                                        {title, topk},
                                        {title + ", no feedback", forgetful}}) {
            DataParallelMlp<T> model = parallel(how);
            Sgd sgd;
            say("\n%-26s", name.c_str());
            for (int step = 0; step <= last; ++step) {
                const double loss = model.loss_and_gradients(mine.x_BI, mine.y, global_);
                if (step % every == 0) say(" %6.3f", loss);
                model.step(sgd);
            }
        }
        say("\n");
    }

    /// The bytes of a step by our own ring, whose messages we see, and of AdamW's state, beside the formulas.
    bool count(Version<T>& version) {
        Strategy ring = version.how;
        ring.reduction = Reduction::ring;
        DataParallelMlp<T> model = parallel(ring);
        AdamW<T> adamw;
        const MlpBatch<T> mine = part(0, world_.rank());
        model.loss_and_gradients(mine.x_BI, mine.y, global_, s_.micro_batches);
        model.step(adamw);
        const int P = world_.size(), r = world_.rank();
        version.counted = model.bytes_sent(), version.state = adamw.state_bytes();
        version.formula = exchange_bytes(ring, parameters_, sizeof(T), P, r);
        const std::size_t piece = cut(parameters_, P, r + 1) - cut(parameters_, P, r);
        version.state_formula = 2 * sizeof(T) * (ring.zero ? piece : parameters_);
        return everywhere(version.counted == version.formula && version.state == version.state_formula);
    }

    void measure(std::vector<Version<T>>& versions) {
        const MlpBatch<T> mine = part(0, world_.rank());
        const int warm_up = 2;
        for (int step = -warm_up; step < s_.steps; ++step)
            for (Version<T>& v : versions) {
                world_.barrier();
                const Timer timer;
                v.model.loss_and_gradients(mine.x_BI, mine.y, global_, s_.micro_batches);
                s_.optimizer == OptimizerKind::sgd ? v.model.step(v.sgd) : v.model.step(v.adamw);
                const double seconds = world_.all_reduce(timer.seconds(), MPI_MAX);
                const double exposed = world_.all_reduce(v.model.exposed_seconds(), MPI_MAX);
                if (step < 0) continue;
                v.seconds.push_back(seconds);
                v.exposed.push_back(exposed);
            }
    }

    void show(const std::vector<Version<T>>& versions) const {
        const auto sign = [](std::size_t a, std::size_t b) { return a == b ? "=" : "!="; };
        say("\n%-10s %11s   %-11s %11s   %-11s %8s %8s %8s\n", "a step", "bytes sent", "formula",
            "AdamW state", "formula", "ms", "in MPI", "GFLOP/s");
        for (const Version<T>& v : versions)
            say("%-10s %11zu %s %-11zu %11zu %s %-11zu %8.3f %8.3f %8.1f\n", name_of(v.method), v.counted,
                sign(v.counted, v.formula), v.formula, v.state, sign(v.state, v.state_formula),
                v.state_formula, median(v.seconds) * 1e3, median(v.exposed) * 1e3,
                flop_ / median(v.seconds) / 1e9);
        for (const Version<T>& v : versions) {
            if (v.method == versions.front().method) continue;
            std::vector<double> ratios;
            for (std::size_t i = 0; i < v.seconds.size(); ++i)
                ratios.push_back(v.seconds[i] / versions.front().seconds[i]);
            say("%s takes %.2f of the time of %s (%.2f to %.2f in %zu rounds)\n", name_of(v.method),
                median(ratios), name_of(versions.front().method), std::ranges::min(ratios),
                std::ranges::max(ratios), ratios.size());
        }
    }

    static std::string share(double keep) {
        char text[16];
        std::snprintf(text, sizeof text, " %.3g", keep);
        return text;
    }

    Record record_of(const Version<T>& version) const {
        const std::string method = name_of(version.method);
        Record line =
            record("dp", version.method == Method::all_reduce ? "dp_mpi" : "dp_mpi-" + method, method);
        line.add("model", "mlp-" + s_.model_name()).add("parameters", parameters_);
        line.add("tokens_per_step", global_).add("flop_per_step", flop_);
        line.add("step_seconds", version.seconds).add("communication_seconds", median(version.exposed));
        line.add("bytes_counted", version.counted).add("bytes_formula", version.formula);
        return line.add("optimizer_state_bytes", version.state);
    }

    std::size_t global_, parameters_ = 0;
    double flop_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    return run_mpi_lesson<Settings, Lesson>("dp_mpi", argc, argv);
}
