// A trainer with no Python in it: torch's autograd and optimizers, this course's process group on MPI.
//
//   mpirun -np 4 dp_libtorch                trains GPT-2 on real text, on all ranks and on one, and compares them
//   mpirun -np 2 dp_libtorch --benchmark    times the steps
#include <string>
#include <vector>

#include "fived/torch/lesson.hpp"
#include "settings.hpp"
#include "trainer.hpp"

namespace {

using namespace fived;

class Lesson : TorchLesson<Settings> {
  public:
    Lesson(const Communicator& world, const Group& group, const Settings& settings)
        : TorchLesson(world, settings),
          group_(group),
          model_(settings.make_model(settings.seed)),
          global_(settings.global_batch(world.size())) {
        for (const at::Tensor& p : model_->parameters()) numbers_ += p.numel();
        if (settings.zero != ZeroStage::one) ways_.push_back(Way::all_reduce);
        if (settings.zero != ZeroStage::zero) ways_.push_back(Way::zero1);
    }

    bool run() {
        bool right = true;
        say("dp_libtorch: %s, %lld parameters, %s, %d rank(s), batch %zu x %d, %s (%.1f MB)\n",
            name_of(s_.model), static_cast<long long>(numbers_), name_of(s_.dtype), world_.size(), global_,
            model_->tokens(), s_.text.name.c_str(), s_.megabytes());
        if (!s_.benchmark) {
            say("\nlargest relative difference from one device, %d steps\n%-18s %8s %8s %8s %8s %6s  %s\n",
                s_.steps, "", "loss", "norm", "gradient", "weights", "ulps", "the largest gradient's is in");
            for (const OptimizerKind optimizer : values_of<OptimizerKind>())
                if (!s_.optimizer || s_.optimizer == optimizer) right &= compare(optimizer);
        }
        right &= measure();
        if (!s_.benchmark)
            say("\n%s: training on %d rank(s) %s training on one.\n", right ? "proved" : "WRONG",
                world_.size(), right ? "equals" : "differs from");
        for (std::size_t i = 0; i < ways_.size(); ++i) append(record_of(i));
        return right;
    }

  private:
    /// This rank's samples of a step, or with Way::one_device all of them.
    Parts parts(Way way, int step) const {
        const bool one = way == Way::one_device;
        const std::size_t n = one ? 1 : world_.size(), r = one ? 0 : world_.rank();
        const std::size_t begin = cut(global_, n, r), mine = cut(global_, n, r + 1) - begin;
        const std::size_t pieces = one ? 1 : s_.micro_batches;
        Parts parts;
        for (std::size_t m = 0; m < pieces; ++m)
            parts.push_back(model_->samples(s_.text, s_.seed, step, begin + cut(mine, pieces, m),
                                            begin + cut(mine, pieces, m + 1)));
        return parts;
    }
    double tokens() const { return double(global_) * model_->tokens(); }
    double targets() const { return double(model_->targets(global_)); }
    std::unique_ptr<Trainer> make(Way way, OptimizerKind optimizer) const {
        const std::uint64_t other =
            way == Way::one_device ? 0 : world_.rank();  // the broadcast must mend this
        return std::make_unique<Trainer>(s_.make_model(s_.seed + other), way, optimizer, group_,
                                         std::size_t(s_.bucket_mb * (1 << 20)));
    }

    /// Trains on all ranks in each way, and on every rank alone on the whole batch, and compares after each step.
    bool compare(OptimizerKind optimizer) {
        const auto alone = make(Way::one_device, optimizer), moved = make(Way::one_device, optimizer);
        move_by_an_ulp(moved->weights());
        struct Run {
            Way way;
            std::unique_ptr<Trainer> trainer;
            Difference loss, norm, gradient, weight, ulps;
        };
        std::vector<Run> runs;
        for (const Way way : ways_) runs.push_back({way, make(way, optimizer), {}, {}, {}, {}, {}});
        std::vector<double> losses;
        for (int step = 0; step < s_.steps; ++step) {
            losses.push_back(alone->backward(parts(Way::one_device, step), targets()));
            moved->backward(parts(Way::one_device, step), targets());
            for (Run& run : runs) {
                Trainer& t = *run.trainer;
                const double loss = world_.all_reduce(t.backward(parts(run.way, step), targets()));
                run.loss.include(largest_difference(world_, losses.back(), loss));
                run.norm.include(largest_difference(world_, alone->gradient_norm(), t.gradient_norm()));
                const auto list =
                    compared_all(*alone, alone->gradients(), moved->gradients(), t.gradients(), t.starts());
                run.gradient.include(largest(list, tolerance()));
                run.ulps.include(in_ulps(list));
                t.update();
            }
            alone->update(), moved->update();
        }
        bool right = true;
        const std::vector<std::int64_t> whole(alone->names().size(), 0);
        for (Run& run : runs) {
            const auto list =
                compared_all(*alone, alone->weights(), moved->weights(), run.trainer->weights(), whole);
            run.weight = largest(list, tolerance());
            run.ulps.include(in_ulps(list));
            say("%-18s %8.1e %8.1e %8.1e %8.1e %6.1f  %s\n",
                (title_of(optimizer) + std::string(", ") + name_of(run.way)).c_str(), run.loss.value,
                run.norm.value, run.gradient.value, run.weight.value, run.ulps.value,
                run.gradient.name.c_str());
            right &= within(name_of(run.way), name_of(optimizer), tolerance(),
                            {run.loss.value, run.norm.value, run.gradient.value, run.weight.value},
                            run.ulps.value);
        }
        say("%-18s", "loss of each step");
        for (const double loss : losses) say(" %.10f", loss);
        say("\n");
        return right;
    }

    /// `b` may be the runs of the flat `a` that begin at `starts`.
    std::vector<Compared> compared_all(const Trainer& names, const Tensors& a, const Tensors& moved,
                                       const Tensors& b, const std::vector<std::int64_t>& starts) const {
        std::vector<Compared> list;
        for (std::size_t i = 0; i < a.size(); ++i) {
            at::Tensor expected;
            if (a[i].defined() && b[i].defined())
                expected = a[i].detach().flatten().narrow(0, starts[i], b[i].numel()).view_as(b[i]);
            list.push_back(compared(names.names()[i], a[i], expected, b[i], moved[i]));
        }
        return list;
    }

    struct Measured {
        std::vector<double> seconds, blocked;
        std::int64_t counted = 0, formula = 0;      // bytes of a step and rank, times the ranks
        std::int64_t state = 0, state_formula = 0;  // bytes of all ranks together
    };

    /// Steps of each way in turn; what they send and what state they leave, against the formulas.
    bool measure() {
        const OptimizerKind optimizer = s_.timed_optimizer();
        std::vector<std::unique_ptr<Trainer>> trainers;
        for (const Way way : ways_) trainers.push_back(make(way, optimizer));
        measured_.resize(ways_.size());
        const int warm_up = 1;
        for (int step = -warm_up; step < s_.steps; ++step)
            for (std::size_t i = 0; i < ways_.size(); ++i) {
                const Parts mine = parts(ways_[i], step + warm_up);
                trainers[i]->take_messages();
                world_.barrier();
                const Timer timer;
                trainers[i]->backward(mine, targets());
                trainers[i]->update();
                const double seconds = world_.all_reduce(timer.seconds(), MPI_MAX);
                if (step < 0) continue;
                double blocked = 0;
                measured_[i].counted = 0;
                for (const Message& m : trainers[i]->take_messages())
                    blocked += m.seconds, measured_[i].counted += m.n_bytes;
                measured_[i].seconds.push_back(seconds);
                measured_[i].blocked.push_back(world_.all_reduce(blocked, MPI_MAX));
            }
        bool right = true;
        say("\n%-12s %12s %12s %18s %12s %14s %10s\n", "a step", "ms", "in messages", "bytes a rank sends",
            "formula", "AdamW's state", "formula");
        for (std::size_t i = 0; i < ways_.size(); ++i) {
            Measured& m = measured_[i];
            m.formula = bytes_by_formula(ways_[i]);
            const std::int64_t whole = optimizer == OptimizerKind::sgd ? 0 : 2 * numbers_ * element();
            m.state = world_.all_reduce(trainers[i]->state_bytes());
            m.state_formula = ways_[i] == Way::zero1 ? whole : whole * world_.size();
            const double n = world_.size();
            say("%-12s %12.3f %12.3f %18.0f %12.0f %14.0f %10.0f\n", name_of(ways_[i]),
                median(m.seconds) * 1e3, median(m.blocked) * 1e3, double(m.counted) / n,
                double(m.formula) / n, double(m.state) / n, double(m.state_formula) / n);
            right &= everywhere(m.counted == m.formula && m.state == m.state_formula);
        }
        for (std::size_t i = 0; i < ways_.size(); ++i) {
            const double seconds = median(measured_[i].seconds);
            say("%s: %.0f %s/s, %.1f GFLOP/s\n", name_of(ways_[i]), tokens() / seconds,
                s_.model == ModelKind::mlp ? "samples" : "tokens", flop() / seconds / 1e9);
        }
        return right;
    }
    /// Bytes that all ranks together send in a step: 2 (n-1) G of gradients, or (n-1) G each of gradients and of
    /// weights, their padding included; and 2 (n-1) times a flag for each parameter.
    std::int64_t bytes_by_formula(Way way) const {
        const Tensors parameters = model_->parameters();
        const std::int64_t n = world_.size(), flags = std::int64_t(parameters.size());
        std::int64_t numbers = 0;
        for (const auto& bucket : cut_into_buckets(parameters, last_to_first(parameters.size()),
                                                   std::size_t(s_.bucket_mb * (1 << 20)))) {
            std::int64_t length = 0;
            for (const std::int64_t index : bucket) length += parameters[index].numel();
            numbers += way == Way::zero1 ? (length + n - 1) / n * n : length;
        }
        return 2 * (n - 1) * (numbers + flags) * element();
    }
    double flop() const { return model_->flop_per_sample() * double(global_); }

    Record record_of(std::size_t i) const {
        const Measured& m = measured_[i];
        const char* name = ways_[i] == Way::zero1 ? "dp_libtorch-zero1" : "dp_libtorch";
        Record line = record("dp", name, name_of(ways_[i]));
        line.add("model", name_of(s_.model)).add("parameters", numbers_).add("flop_per_step", flop());
        line.add("tokens_per_step", std::int64_t(tokens())).add("step_seconds", m.seconds);
        line.add("communication_seconds", median(m.blocked));
        line.add("bytes_counted", double(m.counted) / world_.size());
        return line.add("bytes_formula", double(m.formula) / world_.size());
    }

    const Group& group_;
    std::shared_ptr<Model> model_;
    std::size_t global_;
    std::int64_t numbers_ = 0;
    std::vector<Way> ways_;
    std::vector<Measured> measured_;
};

}  // namespace

int main(int argc, char** argv) {
    return run_torch_lesson<Settings, Lesson>("dp_libtorch", argc, argv);
}
