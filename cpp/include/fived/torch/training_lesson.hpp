// What the lessons on LibTorch that train do: each way to train against one device, timed in turn, its bytes against the
// formula.
#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fived/math/optimizer.hpp"
#include "fived/torch/lesson.hpp"
#include "fived/torch/parameters.hpp"

namespace fived {

/// A Trainer has
///     double backward(int step)               leaves the gradients of the global batch, returns its loss; collective
///     void update()
///     const Parameters& parameters() const    this rank's
///     double squares() const                  of this rank's gradients, each counted once in the sum over ranks
///     std::vector<Message> take_messages()
/// and Settings, of TorchTrainingSettings, flop() of a step.
template <class Settings, class Trainer>
class TrainingLesson : protected TorchLesson<Settings> {
  protected:
    using Base = TorchLesson<Settings>;
    using Base::s_, Base::world_, Base::say, Base::everywhere, Base::within, Base::tolerance;
    using TorchLesson<Settings>::TorchLesson;

    /// By the name of the way; empty where there is one.
    using Trainers = std::vector<std::pair<std::string, std::unique_ptr<Trainer>>>;
    struct Timed {
        std::string name;
        std::int64_t counted = 0, formula = 0;  // bytes of this rank in a step, times the ranks
        double mean = 0, mean_formula = 0;      // bytes of a rank
        std::vector<double> seconds{}, blocked{}, speed_up{};
    };

    /// compare(optimizer) for each one, unless --benchmark, then measure(). how: "training on", say.
    template <class Compare, class Measure>
    bool prove(const char* how, Compare compare, Measure measure) {
        bool right = true;
        if (!s_.benchmark) {
            say("\nlargest relative difference from one device, %d steps\n%-20s %8s %8s %8s %8s %6s  %s\n",
                s_.steps, "", "loss", "norm", "gradient", "weights", "ulps", "the largest gradient's is in");
            for (const OptimizerKind optimizer : values_of<OptimizerKind>())
                if (!s_.optimizer || s_.optimizer == optimizer) right &= compare(optimizer);
        }
        right &= measure();
        if (!s_.benchmark)
            say("\n%s: %s %d rank(s) %s training on one.\n", right ? "proved" : "WRONG", how, world_.size(),
                right ? "equals" : "differs from");
        return right;
    }

    /// Trains each, and `alone` and `moved`, with its weights one unit in the last place away, on every rank by itself, and
    /// compares after each step. piece(name, whole): what of a tensor this rank has in `trainers`; it is asked where their
    /// parameters() have that name. Collective.
    template <class Piece>
    bool compare(OptimizerKind optimizer, Trainer& alone, Trainer& moved, const Trainers& trainers,
                 Piece piece) {
        struct Found {
            Difference loss{}, norm{}, gradient{}, ulps{};
        };
        std::vector<at::Tensor> weights;
        for (const auto& [_, tensor] : moved.parameters()) weights.push_back(tensor);
        move_by_an_ulp(weights);
        std::vector<Found> found(trainers.size());
        std::vector<double> losses;
        for (int step = 0; step < s_.steps; ++step) {
            losses.push_back(alone.backward(step));
            moved.backward(step);
            for (std::size_t i = 0; i < trainers.size(); ++i) {
                Trainer& together = *trainers[i].second;
                found[i].loss.include(largest_difference(world_, losses.back(), together.backward(step)));
                const double norm = std::sqrt(world_.all_reduce(together.squares()));
                found[i].norm.include(largest_difference(world_, std::sqrt(alone.squares()), norm));
                const auto list = compared_all(alone, moved, together, true, piece);
                found[i].gradient.include(this->largest(list, tolerance()));
                found[i].ulps.include(this->in_ulps(list));
                together.update();
            }
            alone.update(), moved.update();
        }
        bool right = true;
        for (std::size_t i = 0; i < trainers.size(); ++i) {
            const auto& [name, together] = trainers[i];
            auto& [loss, norm, gradient, ulps] = found[i];
            const auto list = compared_all(alone, moved, *together, false, piece);
            const Difference weight = this->largest(list, tolerance());
            ulps.include(this->in_ulps(list));
            say("%-20s %8.1e %8.1e %8.1e %8.1e %6.1f  %s\n",
                (title_of(optimizer) + (name.empty() ? "" : ", " + name)).c_str(), loss.value, norm.value,
                gradient.value, weight.value, ulps.value, gradient.name.c_str());
            right &= within(name, name_of(optimizer), tolerance(),
                            {loss.value, norm.value, gradient.value, weight.value}, ulps.value);
        }
        say("%-20s", "loss of each step");
        for (const double loss : losses) say(" %.10f", loss);
        say("\n");
        return right;
    }

    /// Steps of each in turn, and in --benchmark of make_alone() on rank 0; what this rank sends in every step against
    /// formula(i), in bytes times the ranks, asked after the step. Collective.
    template <class MakeAlone, class Formula>
    bool measure(const Trainers& trainers, MakeAlone make_alone, Formula formula) {
        for (const auto& [name, _] : trainers) timed_.push_back({name});
        const bool beside = s_.benchmark && world_.size() > 1;
        std::unique_ptr<Trainer> alone;
        if (beside && world_.rank() == 0) alone = make_alone();
        bool right = true;
        const int warm_up = 1;
        for (int step = -warm_up; step < s_.steps; ++step) {
            const auto time = [&](Trainer* trainer) {
                world_.barrier();
                const Timer timer;
                if (trainer) trainer->backward(step + warm_up), trainer->update();
                return world_.all_reduce(timer.seconds(), MPI_MAX);
            };
            const double one = beside ? time(alone.get()) : 0;
            for (std::size_t i = 0; i < trainers.size(); ++i) {
                Trainer& trainer = *trainers[i].second;
                Timed& timed = timed_[i];
                trainer.take_messages();
                const double seconds = time(&trainer);
                double blocked = 0;
                timed.counted = 0;
                for (const Message& m : trainer.take_messages())
                    blocked += m.seconds, timed.counted += m.n_bytes;
                timed.formula = formula(i);
                right &= timed.counted == timed.formula;
                blocked = world_.all_reduce(blocked, MPI_MAX);
                if (step < 0) continue;
                timed.seconds.push_back(seconds), timed.blocked.push_back(blocked);
                timed.speed_up.push_back(one / seconds);
            }
        }
        show(beside);
        return everywhere(right);
    }

    Record record_of(const Timed& timed, const std::string& strategy,
                     const std::string& implementation) const {
        Record line = this->record(strategy, implementation, timed.name);
        line.add("model", name_of(s_.model)).add("parameters", numbers_).add("flop_per_step", s_.flop());
        line.add("tokens_per_step", std::int64_t(s_.tokens())).add("step_seconds", timed.seconds);
        line.add("communication_seconds", median(timed.blocked)).add("bytes_counted", timed.mean);
        return line.add("bytes_formula", timed.mean_formula);
    }

    std::int64_t numbers_ = 0;  // of the whole model
    std::vector<Timed> timed_;

  private:
    /// Gradients or weights.
    template <class Piece>
    std::vector<Compared> compared_all(const Trainer& alone, const Trainer& moved, const Trainer& together,
                                       bool gradients, Piece piece) const {
        const auto value = [&](const at::Tensor& t) { return gradients ? t.grad() : t.detach(); };
        const at::Tensor nothing = at::empty({0});
        std::vector<Compared> list;
        for (const auto& [name, tensor] : alone.parameters()) {
            const auto mine = together.parameters().find(name);
            const bool here = mine != together.parameters().end();
            list.push_back(compared(name, value(tensor), here ? piece(name, value(tensor)) : nothing,
                                    here ? value(mine->second) : nothing,
                                    value(moved.parameters().at(name))));
        }
        return list;
    }

    void show(bool beside) {
        const auto mean = [&](std::int64_t bytes) {  // over the ranks, of bytes that are times the ranks
            const double n = world_.size();
            return double(world_.all_reduce(bytes)) / n / n;
        };
        say("\n%-12s %10s %12s %22s %12s\n", "a step", "ms", "in messages", "bytes a rank, mean", "formula");
        for (Timed& timed : timed_) {
            timed.mean = mean(timed.counted), timed.mean_formula = mean(timed.formula);
            say("%-12s %10.3f %12.3f %22.0f %12.0f\n", timed.name.c_str(), median(timed.seconds) * 1e3,
                median(timed.blocked) * 1e3, timed.mean, timed.mean_formula);
        }
        for (const Timed& timed : timed_) {
            const double seconds = median(timed.seconds);
            say("%s%s%.0f tokens/s, %.1f GFLOP/s", timed.name.c_str(), timed.name.empty() ? "" : ": ",
                s_.tokens() / seconds, s_.flop() / seconds / 1e9);
            if (beside)
                say("; %.2f times as fast as one rank alone, in turn with it", median(timed.speed_up));
            say("\n");
        }
    }
};

/// A lesson with one way to train: Trainer(settings, optimizer, ranks), of all ranks or of one.
template <class Settings, class Trainer>
class OneWayLesson : protected TrainingLesson<Settings, Trainer> {
    using Base = TrainingLesson<Settings, Trainer>;
    using typename Base::Trainers;

  public:
    OneWayLesson(const Communicator& world, const Group& group, const Settings& settings)
        : Base(world, settings),
          ranks_(c10::make_intrusive<Ranks>(group)),
          one_(c10::make_intrusive<Ranks>(Group())) {}

  protected:
    /// Proves it, times it and keeps the record. piece: as compare() has it; formula(trainer): as measure() has it.
    template <class Piece, class Formula>
    bool prove_and_time(const char* how, const char* strategy, const char* program, Piece piece,
                        Formula formula) {
        const auto& settings = this->s_;
        const auto compare = [&](OptimizerKind optimizer) {
            Trainer alone(settings, optimizer, one_), moved(settings, optimizer, one_);
            return Base::compare(optimizer, alone, moved, together(optimizer), piece);
        };
        const auto measure = [&] {
            const OptimizerKind optimizer = settings.timed_optimizer();
            const Trainers trainers = together(optimizer);
            return Base::measure(
                trainers, [&] { return std::make_unique<Trainer>(settings, optimizer, one_); },
                [&](std::size_t) { return formula(*trainers[0].second); });
        };
        const bool right = this->prove(how, compare, measure);
        this->append(this->record_of(this->timed_[0], strategy, program));
        return right;
    }

    const RanksPtr ranks_, one_;

  private:
    Trainers together(OptimizerKind optimizer) const {
        Trainers list;
        list.emplace_back("", std::make_unique<Trainer>(this->s_, optimizer, ranks_));
        return list;
    }
};

}  // namespace fived
