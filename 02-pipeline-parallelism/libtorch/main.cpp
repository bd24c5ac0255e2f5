// Pipeline parallelism with no Python in it but the schedules' generators, which are asked once at the start: torch's autograd
// and optimizers, this course's process groups on MPI.
//
//   mpirun -np 3 pp_libtorch                      trains GPT-2 on real text by every schedule, and compares with one device
//   mpirun -np 2 pp_libtorch --benchmark          times the steps beside those of one rank alone
//   mpirun -np 2 pp_libtorch --list schedule.txt  runs what stands there, one line a rank
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fived/torch_lesson.hpp"
#include "settings.hpp"
#include "trainer.hpp"

namespace {

using namespace fived;

class Lesson : TorchLesson<Settings> {
  public:
    Lesson(const Communicator& world, const Group& group, const Settings& settings)
        : TorchLesson(world, settings),
          up_(c10::make_intrusive<Ranks>(group)),
          down_(c10::make_intrusive<Ranks>(world_process_group("down"))) {}

    bool run() {
        const Trainer whole(s_, "sgd");
        for (const auto& [_, tensor] : whole.parameters()) numbers_ += tensor.numel();
        say("pp_libtorch: %s, %d layers, %lld parameters, %s, %d rank(s), batch %d x %d, %s (%.1f MB)\n",
            s_.model.c_str(), s_.shape().layers, (long long)numbers_, s_.dtype.c_str(), world_.size(),
            s_.batch, s_.sequence, s_.text.name.c_str(), s_.megabytes());
        bool right = true;
        if (!s_.benchmark) {
            say("\nlargest relative difference from one device, %d steps\n%-20s %8s %8s %8s %8s  %s\n",
                s_.steps, "", "loss", "norm", "gradient", "weights", "the largest gradient's is in");
            for (const std::string optimizer : {"sgd", "adamw"})
                if (s_.optimizer == "both" || s_.optimizer == optimizer) right &= compare(optimizer);
        }
        right &= measure();
        if (!s_.benchmark)
            say("\n%s: training in stages on %d rank(s) %s training on one.\n", right ? "Proved" : "WRONG",
                world_.size(), right ? "equals" : "differs from");
        for (const Timed& timed : timed_) append(record_of(timed, right));
        return right;
    }

  private:
    std::unique_ptr<Trainer> make(const std::string& optimizer, const Schedule& schedule) const {
        return std::make_unique<Trainer>(s_, optimizer, schedule, up_, down_);
    }

    /// Trains by each schedule, and on every rank alone, and compares after each step.
    bool compare(const std::string& optimizer) {
        struct Run {
            std::string name;
            std::unique_ptr<Trainer> trainer;
            Difference loss{}, norm{}, gradient{};
        };
        Trainer alone(s_, optimizer);
        std::vector<Run> runs;
        for (const auto& [name, schedule] : s_.schedules) runs.push_back({name, make(optimizer, schedule)});
        std::vector<double> losses;
        for (int step = 0; step < s_.steps; ++step) {
            losses.push_back(alone.backward(step));
            for (Run& run : runs) {
                Trainer& together = *run.trainer;
                run.loss.include(largest_difference(world_, losses.back(), together.backward(step)));
                const double norm = std::sqrt(world_.all_reduce(together.squares()));
                run.norm.include(largest_difference(world_, std::sqrt(alone.squares()), norm));
                run.gradient.include(difference(alone, together, true));
                together.update();
            }
            alone.update();
        }
        bool right = true;
        for (const Run& run : runs) {
            const Difference weight = difference(alone, *run.trainer, false);
            say("%-20s %8.1e %8.1e %8.1e %8.1e  %s\n",
                ((optimizer == "sgd" ? "SGD, " : "AdamW, ") + run.name).c_str(), run.loss.value,
                run.norm.value, run.gradient.value, weight.value, run.gradient.name.c_str());
            right &= within(tolerance(optimizer),
                            {run.loss.value, run.norm.value, run.gradient.value, weight.value});
        }
        say("%-20s", "loss of each step");
        for (const double loss : losses) say(" %.10f", loss);
        say("\n");
        return right;
    }

    /// Of gradients or weights; of each parameter on the ranks that hold it.
    Difference difference(const Trainer& alone, const Trainer& together, bool gradients) const {
        const auto value = [&](const at::Tensor& t) { return gradients ? t.grad() : t.detach(); };
        const at::Tensor nothing = at::empty({0});
        std::vector<Compared> list;
        for (const auto& [name, tensor] : alone.parameters()) {
            const auto mine = together.parameters().find(name);
            const bool here = mine != together.parameters().end();
            list.push_back(
                {name, value(tensor), here ? value(tensor) : nothing, here ? value(mine->second) : nothing});
        }
        return largest_difference(world_, list);
    }

    struct Timed {
        std::string name;
        std::int64_t counted = 0, formula = 0;  // bytes of this rank, times the ranks
        double mean = 0;                        // bytes of a rank
        std::vector<double> seconds{}, blocked{}, speed_up{};
    };

    /// Steps by each schedule in turn, and in --benchmark on rank 0 alone; what they send, against the formula.
    bool measure() {
        const std::string optimizer = s_.optimizer == "sgd" ? "sgd" : "adamw";
        std::vector<std::unique_ptr<Trainer>> trainers;
        for (const auto& [name, schedule] : s_.schedules) {
            trainers.push_back(make(optimizer, schedule));
            timed_.push_back({name});
            timed_.back().formula = bytes_by_formula(schedule);
        }
        const bool beside = s_.benchmark && world_.size() > 1;
        std::unique_ptr<Trainer> alone;
        if (beside && world_.rank() == 0) alone = std::make_unique<Trainer>(s_, optimizer);
        const int warm_up = 2;
        for (int step = -warm_up; step < s_.steps; ++step) {
            const auto time = [&](Trainer* trainer) {
                world_.barrier();
                const Timer timer;
                if (trainer) trainer->backward(step + warm_up), trainer->update();
                return world_.all_reduce(timer.seconds(), MPI_MAX);
            };
            const double one = beside ? time(alone.get()) : 0;
            for (std::size_t i = 0; i < trainers.size(); ++i) {
                trainers[i]->take_messages();
                const double seconds = time(trainers[i].get());
                double blocked = 0;
                timed_[i].counted = 0;
                for (const Message& m : trainers[i]->take_messages())
                    blocked += m.seconds, timed_[i].counted += m.n_bytes;
                blocked = world_.all_reduce(blocked, MPI_MAX);
                if (step < 0) continue;
                timed_[i].seconds.push_back(seconds), timed_[i].blocked.push_back(blocked);
                timed_[i].speed_up.push_back(one / seconds);
            }
        }
        bool right = true;
        say("\n%-12s %10s %12s %22s %12s\n", "a step", "ms", "in messages", "bytes a rank, mean", "formula");
        for (Timed& timed : timed_) {
            timed.mean = mean(timed.counted);
            say("%-12s %10.3f %12.3f %22.0f %12.0f\n", timed.name.c_str(), median(timed.seconds) * 1e3,
                median(timed.blocked) * 1e3, timed.mean, mean(timed.formula));
            right &= everywhere(timed.counted == timed.formula);
        }
        for (const Timed& timed : timed_) {
            const double seconds = median(timed.seconds);
            say("%s: %.0f tokens/s, %.1f GFLOP/s", timed.name.c_str(), s_.tokens() / seconds,
                flop() / seconds / 1e9);
            if (beside)
                say("; %.2f times as fast as one rank alone, in turn with it", median(timed.speed_up));
            say("\n");
        }
        return right;
    }
    /// What this rank sends in a step, times the ranks: B S D numbers for each side on which a stage has a neighbour on another
    /// rank, the gradient of the embedding that two ranks hold, and the loss.
    std::int64_t bytes_by_formula(const Schedule& schedule) const {
        const Gpt2Shape shape = s_.shape();
        const std::int64_t n = world_.size(), me = world_.rank(), D = shape.width;
        std::int64_t numbers = 0;
        for (int stage = 1; stage < schedule.stages(); ++stage) {
            const int a = schedule.owner[stage - 1], b = schedule.owner[stage];
            if (a != b && (a == me || b == me)) numbers += std::int64_t(s_.tokens()) * D;
        }
        const int first = schedule.owner.front(), last = schedule.owner.back();
        if (first != last && (first == me || last == me)) numbers += shape.vocabulary * D;
        return (n * numbers + 2 * (n - 1)) * std::int64_t(element());
    }
    /// Over the ranks, of bytes that are times the ranks.
    double mean(std::int64_t bytes) const {
        const double n = world_.size();
        return double(world_.all_reduce(bytes)) / n / n;
    }
    double flop() const { return s_.tokens() * s_.shape().flop_per_token(s_.sequence); }

    Record record_of(const Timed& timed, bool right) const {
        Record line = record("pp", "pp_libtorch-" + timed.name, right);
        line.add("model", s_.model).add("parameters", numbers_).add("flop_per_step", flop());
        line.add("tokens_per_step", std::int64_t(s_.tokens())).add("step_seconds", timed.seconds);
        line.add("communication_seconds", median(timed.blocked)).add("bytes_counted", timed.mean);
        return line.add("bytes_formula", mean(timed.formula));
    }

    const RanksPtr up_, down_;
    std::int64_t numbers_ = 0;
    std::vector<Timed> timed_;
};

}  // namespace

int main(int argc, char** argv) {
    return run_torch_lesson<Settings, Lesson>("pp_libtorch", argc, argv);
}
