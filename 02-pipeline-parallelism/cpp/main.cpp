// mpirun -np 4 pp_mpi                trains an MLP under every schedule, and on one rank, and compares them
// mpirun -np 2 pp_mpi --benchmark    times the steps of every schedule and of one rank in turn
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fived/lesson/equality.hpp"
#include "fived/lesson/lesson.hpp"
#include "pp_mpi.hpp"
#include "pp_settings.hpp"

namespace {

using namespace fived;

/// What is timed and counted of one schedule.
template <class T>
struct Version {
    Version(const std::string& name, const Schedule& schedule, const Settings& s, const Communicator& world)
        : name(name), model(s.sizes(), s.seed, world, schedule) {}

    std::string name;
    Pipeline<T> model;
    AdamW<T> adamw{};
    Sgd sgd{};
    std::vector<double> seconds{}, blocked{}, bubbles{};
    std::map<std::pair<Op, int>, std::vector<double>> took{};  // by kind of computation and stage
    double equal_bubble = 0, simulated_bubble = 0;
    std::size_t counted = 0, formula = 0, buffers = 0;
};

template <class T>
class Lesson : LessonBase<Settings> {
  public:
    Lesson(const Communicator& world, const Settings& settings)
        : LessonBase(world, settings), batch_(settings.batch) {}

    bool run() {
        for (const auto& [name, schedule] : s_.schedules)
            versions_.push_back(std::make_unique<Version<T>>(name, schedule, s_, world_));
        flop_ = versions_.front()->model.flop_per_sample() * double(batch_);
        parameters_ = world_.all_reduce(std::uint64_t(versions_.front()->model.weights().size()));
        say("pp_mpi: MLP %s, %zu parameters, %s, %d rank(s), batch %zu, %s (%.1f MB)\n",
            s_.model_name().c_str(), parameters_, name_of(s_.dtype), world_.size(), batch_,
            s_.text.name.c_str(), s_.megabytes());
        bool right = true;
        if (!s_.benchmark) right &= prove();
        right &= measure();
        if (!s_.benchmark) say_verdict(right);
        for (const auto& version : versions_) append(record_of(*version));
        return right;
    }

  private:
    /// Every schedule with both optimizers.
    bool prove() {
        say("\nlargest relative difference from one device, %d steps\n%-26s %8s %8s %8s  %s\n", s_.steps, "",
            "loss", "norm", "gradient", "weights");
        bool right = true;
        if (s_.optimizer != OptimizerKind::adamw) right &= prove_with<Sgd>();
        if (s_.optimizer != OptimizerKind::sgd) right &= prove_with<AdamW<T>>();
        return right;
    }
    template <class Optimizer>
    bool prove_with() {
        bool right = true;
        for (const auto& [name, schedule] : s_.schedules) right &= compare<Optimizer>(name, schedule);
        return right;
    }

    /// Trains on all ranks, and serially on every rank, and compares after each step.
    template <class Optimizer>
    bool compare(const std::string& name, const Schedule& schedule) {
        const double tolerance = this->tolerance();
        Pipeline<T> ours(s_.sizes(), s_.seed, world_, schedule);
        Mlp<T> serial(s_.sizes(), s_.seed);
        Optimizer our_optimizer, serial_optimizer;
        Difference loss, norm, gradient, weight;
        const auto difference = [&](std::span<const T> a, std::span<const T> mine) {
            return largest_difference<T>(world_, serial.parameters(), a,
                                         whole(serial.parameters(), ours.parameters(), mine), tolerance);
        };
        for (int step = 0; step < s_.steps; ++step) {
            const MlpBatch<T> all(s_, step, 0, batch_);
            loss.include(largest_difference(world_, serial_loss(serial, all, 1),
                                            ours.loss_and_gradients(all.x_BI, all.y)));
            const double serial_norm = std::sqrt(sum_of_squares<T>(serial.gradients()));
            norm.include(largest_difference(world_, serial_norm, ours.gradient_norm()));
            gradient.include(difference(serial.gradients(), ours.gradients()));
            ours.step(our_optimizer);
            serial_optimizer.step(serial.weights(), std::span<const T>(serial.gradients()));
            weight.include(difference(serial.weights(), ours.weights()));
        }
        const bool apart = gradient.value > 0 || weight.value > 0;
        const std::string where = "  (" + gradient.name + "; " + weight.name + ")";
        say("%-26s %8.1e %8.1e %8.1e  %.1e%s\n",
            (std::string(title_of(Optimizer::kind)) + ", " + name).c_str(), loss.value, norm.value,
            gradient.value, weight.value, apart ? where.c_str() : "");
        return within(name, name_of(Optimizer::kind), tolerance,
                      {loss.value, norm.value, gradient.value, weight.value});
    }

    /// Of all ranks' parts, the whole model's values in the order of `all`.
    std::vector<T> whole(std::span<const Parameter> all, std::span<const Parameter> mine,
                         std::span<const T> values) const {
        std::vector<T> flat(all.front().offset + all.back().offset + all.back().size());
        for (const Parameter& p : mine) {
            const auto place = std::ranges::find(all, p.name, &Parameter::name);
            std::ranges::copy(values.subspan(p.offset, p.size()), flat.begin() + place->offset);
        }
        world_.all_reduce(std::span(flat));
        return flat;
    }

    double serial_loss(Mlp<T>& mlp, const MlpBatch<T>& all, int micro_batches) const {
        double loss = 0;
        for (int m = 0; m < micro_batches; ++m) {
            const std::size_t begin = cut(batch_, micro_batches, m), end = cut(batch_, micro_batches, m + 1);
            loss += mlp.loss_and_gradients(all.x_BI.row_block(begin, end - begin),
                                           std::span(all.y).subspan(begin, end - begin), 1 / double(batch_),
                                           m > 0, [](std::size_t) {});
        }
        return loss;
    }

    /// The schedules in turn, and rank 0 alone: with the whole batch at once and in micro-batches.
    bool measure() {
        const MlpBatch<T> all(s_, 0, 0, batch_);
        std::unique_ptr<Mlp<T>> serial;
        if (world_.rank() == 0) serial = std::make_unique<Mlp<T>>(s_.sizes(), s_.seed);
        AdamW<T> adamw;
        Sgd sgd;
        const auto alone = [&](int micro_batches) {
            world_.barrier();
            const Timer timer;
            if (serial) {
                serial_loss(*serial, all, micro_batches);
                const std::span<const T> gradients = serial->gradients();
                s_.optimizer == OptimizerKind::sgd ? sgd.step(serial->weights(), gradients)
                                                   : adamw.step(serial->weights(), gradients);
            }
            return world_.all_reduce(timer.seconds(), MPI_MAX);
        };
        for (int round = -1; round < s_.steps; ++round) {
            const double at_once = alone(1),
                         in_parts = alone(versions_.front()->model.schedule().micro_batches);
            if (round >= 0) whole_.push_back(at_once), parts_.push_back(in_parts);
            for (const auto& version : versions_) time_step(*version, all, round >= 0);
        }
        bool right = true;
        for (const auto& version : versions_) {
            Version<T>& v = *version;
            const std::uint64_t counted = v.model.bytes_sent(), formula = v.model.bytes_by_formula(batch_);
            right &= everywhere(counted == formula);
            v.counted = world_.all_reduce(counted, MPI_MAX), v.formula = world_.all_reduce(formula, MPI_MAX);
            v.buffers = world_.all_reduce(std::uint64_t(v.model.buffer_bytes()), MPI_MAX);
            simulate(v);
        }
        show();
        return right;
    }

    void time_step(Version<T>& v, const MlpBatch<T>& all, bool keep) {
        world_.barrier();
        const Timer timer;
        v.model.loss_and_gradients(all.x_BI, all.y);
        s_.optimizer == OptimizerKind::sgd ? v.model.step(v.sgd) : v.model.step(v.adamw);
        const double seconds = world_.all_reduce(timer.seconds(), MPI_MAX);
        const double blocked = world_.all_reduce(v.model.blocked_seconds(), MPI_MAX);
        double busy = 0, end = 0;
        for (const Event& e : v.model.events()) busy += e.end - e.start, end = e.end;
        busy = world_.all_reduce(busy), end = world_.all_reduce(end, MPI_MAX);
        if (!keep) return;
        v.seconds.push_back(seconds), v.blocked.push_back(blocked);
        v.bubbles.push_back(1 - busy / (world_.size() * end));
        for (const Event& e : v.model.events())
            v.took[{e.instruction.op, e.instruction.stage}].push_back(e.end - e.start);
    }

    /// The bubble where forward and the two halves of backward take the same time, and where they take what they took.
    void simulate(Version<T>& v) const {
        const Schedule& schedule = v.model.schedule();
        std::vector<double> medians(4 * schedule.stages());
        const auto place = [](Op op, int stage) { return 4 * stage + int(op); };
        for (const auto& [what, seconds] : v.took) medians[place(what.first, what.second)] = median(seconds);
        world_.all_reduce(std::span(medians));  // a stage is on one rank; the others bring zeros
        v.equal_bubble =
            simulated_bubble(schedule, [](const Instruction& i) { return i.op == Op::B ? 2.0 : 1.0; });
        v.simulated_bubble =
            simulated_bubble(schedule, [&](const Instruction& i) { return medians[place(i.op, i.stage)]; });
    }

    void show() const {
        say("\none rank alone: %.1f ms a step in the same micro-batches, %.1f GFLOP/s (speed-ups are over "
            "this); "
            "%.1f ms with the whole batch at once\n",
            median(parts_) * 1e3, flop_ / median(parts_) / 1e9, median(whole_) * 1e3);
        say("\n%-12s %10s   %-10s %8s %8s %8s %8s  %-16s %s\n", "a step", "bytes sent", "formula", "buffers",
            "ms", "waiting", "GFLOP/s", "speed-up, of", "bubble: F=I=W, with measured times, measured");
        for (const auto& version : versions_) {
            const Version<T>& v = *version;
            const double speed_up = ratio(parts_, v.seconds), allowed = world_.size() * (1 - v.equal_bubble);
            say("%-12s %10zu %s %-10zu %5.1f MB %8.2f %8.2f %8.1f  %5.2f %5.2f = %3.0f%%  %5.1f%% %5.1f%% "
                "%5.1f%%\n",
                v.name.c_str(), v.counted, v.counted == v.formula ? "=" : "!=", v.formula,
                double(v.buffers) / 1e6, median(v.seconds) * 1e3, median(v.blocked) * 1e3,
                flop_ / median(v.seconds) / 1e9, speed_up, allowed, 100 * speed_up / allowed,
                100 * v.equal_bubble, 100 * v.simulated_bubble, 100 * median(v.bubbles));
        }
    }

    Record record_of(const Version<T>& v) const {
        Record line = record("pp", "pp_mpi-" + v.name, v.name);
        line.add("model", "mlp-" + s_.model_name()).add("parameters", parameters_);
        line.add("tokens_per_step", batch_).add("flop_per_step", flop_);
        line.add("step_seconds", v.seconds).add("communication_seconds", median(v.blocked));
        line.add("bytes_counted", v.counted).add("bytes_formula", v.formula);
        line.add("micro_batches", v.model.schedule().micro_batches).add("buffer_bytes", v.buffers);
        line.add("bubble_equal_times", v.equal_bubble).add("bubble_simulated", v.simulated_bubble);
        line.add("bubble_measured", median(v.bubbles));
        line.add("one_rank_seconds", median(parts_));
        return line.add("one_rank_at_once_seconds", median(whole_));
    }

    const std::size_t batch_;
    std::vector<std::unique_ptr<Version<T>>> versions_;
    std::vector<double> whole_, parts_;
    std::size_t parameters_ = 0;
    double flop_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    return run_mpi_lesson<Settings, Lesson>("pp_mpi", argc, argv);
}
