// Tensor parallelism with no Python in it: torch's autograd and optimizers, this course's process group on MPI.
//
//   mpirun -np 4 tp_libtorch                trains GPT-2 on real text, split over all ranks and on one, and compares
//   mpirun -np 2 tp_libtorch --benchmark    times the steps beside those of one rank alone
#include <memory>
#include <string>
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
          ranks_(c10::make_intrusive<Ranks>(group)),
          one_(c10::make_intrusive<Ranks>(Group())) {}

    bool run() {
        const Parameters whole = s_.shape().initial(s_.seed, s_.type());
        for (const auto& [_, tensor] : whole) numbers_ += tensor.numel();
        for (const auto& [_, tensor] : split(whole, *ranks_)) mine_ += tensor.numel();
        say("tp_libtorch: %s, %lld parameters (%lld on a rank), %s, %d rank(s), batch %d x %d, %s (%.1f "
            "MB)\n",
            s_.model.c_str(), (long long)numbers_, (long long)world_.all_reduce(mine_, MPI_MAX),
            s_.dtype.c_str(), world_.size(), s_.batch, s_.sequence, s_.text.name.c_str(), s_.megabytes());
        bool right = true;
        if (!s_.benchmark) {
            say("\nlargest relative difference from one device, %d steps\n%-8s %8s %8s %8s %8s  %s\n",
                s_.steps, "", "loss", "norm", "gradient", "weights", "the largest gradient's is in");
            for (const std::string optimizer : {"sgd", "adamw"})
                if (s_.optimizer == "both" || s_.optimizer == optimizer) right &= compare(optimizer);
        }
        right &= measure();
        if (!s_.benchmark)
            say("\n%s: training split over %d rank(s) %s training on one.\n", right ? "Proved" : "WRONG",
                world_.size(), right ? "equals" : "differs from");
        append(record_of(right));
        return right;
    }

  private:
    /// Trains on all ranks, and on every rank alone, and compares after each step.
    bool compare(const std::string& optimizer) {
        Trainer alone(s_, optimizer, one_), together(s_, optimizer, ranks_);
        Difference loss, norm, gradient;
        std::vector<double> losses;
        for (int step = 0; step < s_.steps; ++step) {
            losses.push_back(alone.backward(step));
            loss.include(largest_difference(world_, losses.back(), together.backward(step)));
            norm.include(
                largest_difference(world_, gradient_norm(alone, false), gradient_norm(together, true)));
            gradient.include(difference(alone, together, true));
            alone.update();
            together.update();
        }
        const Difference weight = difference(alone, together, false);
        say("%-8s %8.1e %8.1e %8.1e %8.1e  %s\nloss of each step", optimizer == "sgd" ? "SGD" : "AdamW",
            loss.value, norm.value, gradient.value, weight.value, gradient.name.c_str());
        for (const double value : losses) say(" %.10f", value);
        say("\n");
        return within(tolerance(optimizer), {loss.value, norm.value, gradient.value, weight.value});
    }

    /// Each parameter counts once: pieces on every rank, what is whole on one.
    double gradient_norm(const Trainer& trainer, bool in_pieces) const {
        double whole = 0, pieces = 0;
        for (const auto& [name, tensor] : trainer.parameters())
            (split_dimension(name) < 0 ? whole : pieces) +=
                tensor.grad().to(at::kDouble).square().sum().item<double>();
        return std::sqrt(whole + (in_pieces ? world_.all_reduce(pieces) : pieces));
    }

    /// Of gradients or weights.
    Difference difference(const Trainer& alone, const Trainer& together, bool gradients) const {
        const auto value = [&](const at::Tensor& t) { return gradients ? t.grad() : t.detach(); };
        std::vector<Compared> list;
        for (const auto& [name, tensor] : alone.parameters())
            list.push_back({name, value(tensor), piece_of(value(tensor), split_dimension(name), *ranks_),
                            value(find(together.parameters(), name))});
        return largest_difference(world_, list);
    }

    /// Steps on all ranks, and in --benchmark in turn on rank 0 alone; what they send, against the formula.
    bool measure() {
        const std::string optimizer = s_.optimizer == "sgd" ? "sgd" : "adamw";
        Trainer together(s_, optimizer, ranks_);
        std::unique_ptr<Trainer> alone;
        if (s_.benchmark && world_.size() > 1 && world_.rank() == 0)
            alone = std::make_unique<Trainer>(s_, optimizer, one_);
        std::vector<double> speed_up;
        const int warm_up = 2;
        for (int step = -warm_up; step < s_.steps; ++step) {
            const auto time = [&](Trainer* trainer) {
                world_.barrier();
                const Timer timer;
                if (trainer) trainer->backward(step + warm_up), trainer->update();
                return world_.all_reduce(timer.seconds(), MPI_MAX);
            };
            const double one = s_.benchmark && world_.size() > 1 ? time(alone.get()) : 0;
            together.take_messages();
            const double seconds = time(&together);
            counted_ = 0;
            double blocked = 0;
            for (const Message& m : together.take_messages()) blocked += m.seconds, counted_ += m.n_bytes;
            blocked = world_.all_reduce(blocked, MPI_MAX);
            if (step < 0) continue;
            seconds_.push_back(seconds), blocked_.push_back(blocked), speed_up.push_back(one / seconds);
        }
        // Two sums of x a layer forward and two backward, one each for embedding and head, three numbers a token for the loss.
        const Gpt2 shape = s_.shape();
        formula_ = 2 * (world_.size() - 1) * std::int64_t(s_.tokens()) *
                   (shape.width * (4 * shape.layers + 2) + 3) * std::int64_t(element());
        const double n = world_.size(), seconds = median(seconds_);
        say("\n%-8s %10s %12s %18s %12s\n%-8s %10.3f %12.3f %18.0f %12.0f\n", "a step", "ms", "in messages",
            "bytes a rank sends", "formula", "", seconds * 1e3, median(blocked_) * 1e3, double(counted_) / n,
            double(formula_) / n);
        say("%.0f tokens/s, %.1f GFLOP/s\n", s_.tokens() / seconds, flop() / seconds / 1e9);
        if (s_.benchmark && world_.size() > 1)
            say("%.2f times as fast as one rank alone, in turn with it\n", median(speed_up));
        return everywhere(counted_ == formula_);
    }
    double flop() const { return s_.tokens() * s_.shape().flop_per_token(s_.sequence); }

    Record record_of(bool right) const {
        Record line = record("tp", "tp_libtorch", right);
        line.add("model", s_.model).add("parameters", numbers_).add("flop_per_step", flop());
        line.add("tokens_per_step", std::int64_t(s_.tokens())).add("step_seconds", seconds_);
        line.add("communication_seconds", median(blocked_));
        line.add("bytes_counted", double(counted_) / world_.size());
        return line.add("bytes_formula", double(formula_) / world_.size());
    }

    const RanksPtr ranks_, one_;
    std::int64_t numbers_ = 0, mine_ = 0, counted_ = 0, formula_ = 0;  // bytes: of a rank, times the ranks
    std::vector<double> seconds_, blocked_;
};

}  // namespace

int main(int argc, char** argv) {
    return run_torch_lesson<Settings, Lesson>("tp_libtorch", argc, argv);
}
