// mpirun -np 8 hybrid_mpi --pp 2 --dp 2 --tp 2      trains GPT-2 on the mesh and on one rank, and compares them
// mpirun -np 4 hybrid_mpi --sp 2 --tp 2 --explain   prints the mesh and the bytes of a step, too
// mpirun -np 2 hybrid_mpi --benchmark --tp 2        times the steps beside one rank
// mpirun -np 4 hybrid_mpi --train --tp 2 --save f   trains as train_llama.py does; --resume f goes on, on any mesh
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fived/lesson/equality.hpp"
#include "fived/lesson/lesson.hpp"
#include "hybrid_bytes.hpp"
#include "hybrid_mpi.hpp"
#include "hybrid_run.hpp"
#include "hybrid_settings.hpp"

namespace {

using namespace fived;

/// Samples [begin, begin + n) of the global batch of a step.
struct Samples {
    std::vector<std::int64_t> tokens, targets;
    MatrixView<std::int64_t> tokens_BS, targets_BS;

    Samples(const Settings& s, int step, const Range& part)
        : tokens(part.length * s.sequence),
          targets(tokens.size()),
          tokens_BS(tokens.data(), part.length, s.sequence),
          targets_BS(targets.data(), part.length, s.sequence) {
        lm_samples(s.text.train, s.seed, step, part.begin, tokens_BS, targets_BS);
    }
};

/// The plain model's schedule: one stage, one micro-batch.
Schedule at_once() {
    return read_schedule("F 0 0;B 0 0");
}

template <class T>
class Lesson : LessonBase<Settings> {
  public:
    Lesson(const Communicator& world, const Settings& settings)
        : LessonBase(world, settings),
          mesh_(world, settings.mesh),
          self_(MPI_COMM_SELF, "self"),
          alone_(self_, {}),
          mine_(range(std::size_t(settings.batch), mesh_.along(sample_axes).size(),
                      mesh_.along(sample_axes).rank())) {}

    bool run() {
        say("hybrid_mpi: %s, %zu parameters, %s, mesh %s, batch %d x %d, %s (%.1f MB)\n", name_of(s_.model),
            s_.shape().parameters(), name_of(s_.dtype), s_.mesh.name().c_str(), s_.batch, s_.sequence,
            s_.text.name.c_str(), s_.megabytes());
        if (s_.explain) explain();
        if (s_.train) return train_run();
        bool right = s_.benchmark || prove();
        right &= measure();
        if (!s_.benchmark) say_verdict(right);
        return right;
    }

  private:
    struct Found {
        Difference loss{}, norm{}, gradient{}, ulps{};
    };

    std::unique_ptr<Hybrid<T>> make(const Mesh& mesh, const Schedule& schedule) const {
        return std::make_unique<Hybrid<T>>(s_.shape(), mesh, schedule, s_.sequence, s_.order(), s_.seed);
    }
    double train(Hybrid<T>& model, int step, const Range& part) const {
        const Samples samples(s_, step, part);
        return model.loss_and_gradients(samples.tokens_BS, samples.targets_BS);
    }
    Range all() const { return {0, std::size_t(s_.batch)}; }

    bool train_run() {
        RunModel<T> model(s_, mesh_);
        return TrainingRun(world_, s_).train(model, s_.mesh.name());
    }
    /// Every schedule with both optimizers.
    bool prove() {
        say("\nlargest relative difference from one device, %d steps\n%-16s %8s %8s %8s %8s %6s  %s\n",
            s_.steps, "", "loss", "norm", "gradient", "weights", "ulps", "the largest gradient's is in");
        bool right = true;
        if (s_.optimizer != OptimizerKind::adamw) right &= prove_with<Sgd>();
        if (s_.optimizer != OptimizerKind::sgd) right &= prove_with<AdamW<T>>();
        return right;
    }

    /// Trains on the mesh by each schedule, and on every rank by itself, and compares after each step. `moved` has its
    /// weights one unit in the last place away: what that moves is the unit of the last measure.
    template <class Optimizer>
    bool prove_with() {
        const auto alone = make(alone_, at_once()), moved = make(alone_, at_once());
        move_by_an_ulp(*moved);
        std::vector<std::unique_ptr<Hybrid<T>>> ours;
        for (const auto& [_, schedule] : s_.schedules) ours.push_back(make(mesh_, schedule));
        std::vector<Optimizer> optimizers(ours.size() + 2);
        std::vector<Found> found(ours.size());
        std::vector<double> losses;
        bool right = true;
        for (int step = 0; step < s_.steps; ++step) {
            losses.push_back(train(*alone, step, all()));
            train(*moved, step, all());
            for (std::size_t i = 0; i < ours.size(); ++i) {
                mesh_.forget();
                found[i].loss.include(
                    largest_difference(world_, losses.back(), train(*ours[i], step, mine_)));
                right &= everywhere(mesh_.sent() == formula(*ours[i]));
                found[i].norm.include(
                    largest_difference(world_, alone->gradient_norm(), ours[i]->gradient_norm()));
                include(found[i], compared(*alone, *moved, *ours[i], &Hybrid<T>::gradients));
                ours[i]->step(optimizers[i]);
            }
            alone->step(optimizers[ours.size()]), moved->step(optimizers[ours.size() + 1]);
        }
        for (std::size_t i = 0; i < ours.size(); ++i) {
            auto& [loss, norm, gradient, ulps] = found[i];
            Found weights;
            include(weights, compared(*alone, *moved, *ours[i], &Hybrid<T>::weights));
            ulps.include(weights.ulps);
            const std::string& name = s_.schedules[i].first;
            say("%-16s %8.1e %8.1e %8.1e %8.1e %6.1f  %s\n",
                (std::string(title_of(Optimizer::kind)) + ", " + name).c_str(), loss.value, norm.value,
                gradient.value, weights.gradient.value, ulps.value, gradient.name.c_str());
            right &= within(name, name_of(Optimizer::kind), tolerance(),
                            {loss.value, norm.value, gradient.value, weights.gradient.value}, ulps.value);
        }
        say("%-16s", "loss of each step");
        for (const double loss : losses) say(" %.10f", loss);
        say("\n");
        return right;
    }

    void move_by_an_ulp(Hybrid<T>& model) const {
        constexpr T infinity = std::numeric_limits<T>::infinity();
        std::uint64_t k = 0;
        for (T& w : model.weights()) w = std::nextafter(w, random_bits(0, 0, k++) & 1 ? infinity : -infinity);
    }

    /// Weights or gradients: this rank's parts beside those of one device.
    std::vector<Compared> compared(Hybrid<T>& alone, Hybrid<T>& moved, Hybrid<T>& ours,
                                   std::span<T> (Hybrid<T>::*values)()) const {
        const std::span<const T> a = (alone.*values)(), u = (moved.*values)(), b = (ours.*values)();
        std::vector<Compared> list;
        for (const Placed& whole : alone.parameters()) {
            Compared& compared = list.emplace_back(Compared{whole.name});
            for (std::size_t i = 0; i < whole.size(); ++i)
                compared.unit = std::max(compared.unit, distance(a[whole.offset + i], u[whole.offset + i]));
            const auto part =
                std::ranges::find(ours.parameters(), whole.name, [](const Placed& p) { return p.name; });
            if (part == ours.parameters().end()) continue;
            for (std::size_t i = 0; i < part->size(); ++i)
                compared.include(double(a[whole.offset + part->place(i)]), double(b[part->offset + i]));
        }
        return list;
    }
    void include(Found& found, const std::vector<Compared>& list) const {
        found.gradient.include(largest_difference(world_, list, share_of_largest<T>(tolerance())));
        found.ulps.include(largest_in_ulps(world_, list, double(std::numeric_limits<T>::epsilon())));
    }

    Bytes formula(const Hybrid<T>& model) const {
        const std::size_t tokens = mine_.length * s_.sequence / mesh_.size(Axis::sp);
        return bytes_by_formula(model, std::int64_t(tokens));
    }
    /// Of this rank, over all lines.
    double total(const Bytes& bytes) const {
        double sum = 0;
        for (const auto& [axes, line] : mesh_.lines())
            if (const auto found = bytes.find(axes.name()); found != bytes.end())
                sum += double(found->second) / line->size();
        return sum;
    }

    /// Steps by each schedule in turn; with --benchmark beside one rank that has the whole batch.
    bool measure() {
        struct Timed {
            std::vector<double> seconds{}, messages{}, speed_up{};
            double counted = 0, formula = 0;
        };
        const bool beside = s_.benchmark && world_.size() > 1;
        const auto alone = beside && world_.rank() == 0 ? make(alone_, at_once()) : nullptr;
        std::vector<std::unique_ptr<Hybrid<T>>> ours;
        for (const auto& [_, schedule] : s_.schedules) ours.push_back(make(mesh_, schedule));
        std::vector<AdamW<T>> optimizers(ours.size() + 1);
        std::vector<Timed> timed(ours.size());
        bool right = true;
        const auto time = [&](Hybrid<T>* model, AdamW<T>& optimizer, int step, const Range& part) {
            world_.barrier();
            const Timer timer;
            if (model) train(*model, step, part), model->step(optimizer);
            return world_.all_reduce(timer.seconds(), MPI_MAX);
        };
        for (int step = -1; step < s_.steps; ++step) {
            const double one = beside ? time(alone.get(), optimizers.back(), step + 1, all()) : 0;
            for (std::size_t i = 0; i < ours.size(); ++i) {
                mesh_.forget();
                const double seconds = time(ours[i].get(), optimizers[i], step + 1, mine_);
                right &= everywhere(mesh_.sent() == formula(*ours[i]));
                const double messages = world_.all_reduce(mesh_.seconds(), MPI_MAX);
                timed[i].counted = mean(total(mesh_.sent())),
                timed[i].formula = mean(total(formula(*ours[i])));
                if (step < 0) continue;
                timed[i].seconds.push_back(seconds), timed[i].messages.push_back(messages);
                timed[i].speed_up.push_back(one / seconds);
            }
        }
        say("\n%-12s %10s %12s %20s %12s %9s\n", "a step", "ms", "in messages", "bytes a rank, mean",
            "formula", "GFLOP/s");
        for (std::size_t i = 0; i < ours.size(); ++i) {
            const Timed& t = timed[i];
            const std::string& name = s_.schedules[i].first;
            say("%-12s %10.3f %12.3f %20.0f %12.0f %9.1f\n", name.c_str(), median(t.seconds) * 1e3,
                median(t.messages) * 1e3, t.counted, t.formula, s_.flop() / median(t.seconds) / 1e9);
            if (beside) say("%.2f times as fast as one rank alone, in turn with it\n", median(t.speed_up));
            Record line = record("hybrid", "hybrid_mpi-" + name, name);
            line.add("model", name_of(s_.model)).add("parameters", s_.shape().parameters());
            line.add("mesh", s_.mesh.name()).add("micro_batches", ours[i]->schedule().micro_batches);
            line.add("flop_per_step", s_.flop()).add("tokens_per_step", std::int64_t(s_.tokens()));
            line.add("step_seconds", t.seconds).add("communication_seconds", median(t.messages));
            append(line.add("bytes_counted", t.counted).add("bytes_formula", t.formula));
        }
        return right;
    }
    double mean(double of_rank) const { return world_.all_reduce(of_rank) / world_.size(); }

    /// The place of each rank, and the bytes that rank 0 sends in a step.
    void explain() const {
        say("\nrank  pp dp ep sp tp   samples\n");
        for (int rank = 0; rank < world_.size(); ++rank) {
            int rest = rank;
            std::array<int, 5> at{};
            for (int axis = 5; axis-- > 0; rest /= s_.mesh.sizes()[axis])
                at[axis] = rest % s_.mesh.sizes()[axis];
            const Range part =
                range(std::size_t(s_.batch), s_.mesh.dp * s_.mesh.ep, at[1] * s_.mesh.ep + at[2]);
            say("%4d  %2d %2d %2d %2d %2d   %zu to %zu\n", rank, at[0], at[1], at[2], at[3], at[4],
                part.begin, part.end() - 1);
        }
        for (const auto& [name, schedule] : s_.schedules) {
            const auto model = make(mesh_, schedule);
            say("\nbytes that rank 0 sends in a step, %s\n", name.c_str());
            const Bytes bytes = formula(*model);
            for (const auto& [axes, line] : mesh_.lines())
                if (const auto found = bytes.find(axes.name()); found != bytes.end())
                    say("%-10s %12.0f\n", axes.name().c_str(), double(found->second) / line->size());
        }
    }

    const Mesh mesh_;
    const Communicator self_;
    const Mesh alone_;
    const Range mine_;  // this rank's samples
};

}  // namespace

int main(int argc, char** argv) {
    return run_mpi_lesson<Settings, Lesson>("hybrid_mpi", argc, argv);
}
