// Tensor parallelism with no Python in it: torch's autograd and optimizers, this course's process group on MPI.
//
//   mpirun -np 4 tp_libtorch                trains GPT-2 on real text, split over all ranks and on one, and compares
//   mpirun -np 2 tp_libtorch --benchmark    times the steps beside those of one rank alone
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "fived/equality.hpp"
#include "process_group.hpp"
#include "settings.hpp"
#include "trainer.hpp"

namespace {

using namespace fived;

class Lesson {
  public:
    Lesson(const Communicator& world, const Group& group, const Settings& settings, const Text& text)
        : world_(world),
          ranks_(c10::make_intrusive<Ranks>(group)),
          one_(c10::make_intrusive<Ranks>(Group())),
          s_(settings),
          text_(text) {}

    bool run() {
        const Parameters whole = s_.shape().initial(s_.seed, s_.type());
        for (const auto& [_, tensor] : whole) numbers_ += tensor.numel();
        for (const auto& [_, tensor] : split(whole, *ranks_)) mine_ += tensor.numel();
        say("tp_libtorch: %s, %lld parameters (%lld on a rank), %s, %d rank(s), batch %d x %d, %s (%.1f "
            "MB)\n",
            s_.model.c_str(), (long long)numbers_, (long long)world_.all_reduce(mine_, MPI_MAX),
            s_.dtype.c_str(), world_.size(), s_.batch, s_.sequence, text_.name.c_str(),
            double(text_.train.size()) / 1e6);
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
        if (!s_.json.empty() && world_.rank() == 0) record(right).append_to(s_.json);
        return right;
    }

  private:
    template <class... Values>
    void say(const char* format, Values... values) const {
        if (world_.rank() == 0) std::printf(format, values...), std::fflush(stdout);
    }
    // Sums in another order, nothing else; AdamW divides by |gradient|, which float32's rounding of small ones moves.
    double tolerance(const std::string& optimizer) const {
        return s_.dtype == "float64" ? 1e-12 : optimizer == "adamw" ? 1e-2 : 1e-5;
    }

    /// Trains on all ranks, and on every rank alone, and compares after each step.
    bool compare(const std::string& optimizer) {
        Trainer alone(s_, text_, optimizer, one_), together(s_, text_, optimizer, ranks_);
        Difference loss, norm, gradient;
        std::vector<double> losses;
        for (int step = 0; step < s_.steps; ++step) {
            losses.push_back(alone.backward(step));
            const double apart = relative_difference(losses.back(), together.backward(step));
            loss.include({world_.all_reduce(apart, MPI_MAX), ""});
            const double norms =
                relative_difference(gradient_norm(alone, false), gradient_norm(together, true));
            norm.include({world_.all_reduce(norms, MPI_MAX), ""});
            gradient.include(difference(alone, together, true));
            alone.update();
            together.update();
        }
        const Difference weight = difference(alone, together, false);
        say("%-8s %8.1e %8.1e %8.1e %8.1e  %s\nloss of each step", optimizer == "sgd" ? "SGD" : "AdamW",
            loss.value, norm.value, gradient.value, weight.value, gradient.name.c_str());
        for (const double value : losses) say(" %.10f", value);
        say("\n");
        const double largest = std::max({loss.value, norm.value, gradient.value, weight.value});
        largest_ = std::max(largest_, largest);
        return largest <= tolerance(optimizer);
    }

    /// Each parameter counts once: pieces on every rank, what is whole on one.
    double gradient_norm(const Trainer& trainer, bool in_pieces) const {
        double whole = 0, pieces = 0;
        for (const auto& [name, tensor] : trainer.parameters())
            (split_dimension(name) < 0 ? whole : pieces) +=
                tensor.grad().to(at::kDouble).square().sum().item<double>();
        return std::sqrt(whole + (in_pieces ? world_.all_reduce(pieces) : pieces));
    }

    /// Tensor by tensor max |a - b| / max |a|, the largest of all ranks, of gradients or weights. A tensor that is zero up
    /// to rounding is measured on the model's scale, as in common/equality.py.
    Difference difference(const Trainer& alone, const Trainer& together, bool gradients) const {
        const auto value = [&](const at::Tensor& t) { return gradients ? t.grad() : t.detach(); };
        const auto size_of = [](const at::Tensor& t) { return t.abs().max().item<double>(); };
        const double rounding = s_.dtype == "float64" ? 0x1p-52 : 0x1p-23;
        double model_size = 0;
        for (const auto& [_, tensor] : alone.parameters())
            model_size = std::max(model_size, size_of(value(tensor)));
        std::vector<double> values;
        for (const auto& [name, tensor] : alone.parameters()) {
            const at::Tensor a = value(tensor), b = value(find(together.parameters(), name));
            const double apart = size_of(piece_of(a, split_dimension(name), *ranks_) - b);
            const double scale = size_of(a) > 64 * rounding * model_size ? size_of(a) : model_size;
            values.push_back(std::isfinite(apart) && apart > 0 ? apart / scale : apart == 0 ? 0 : INFINITY);
        }
        world_.all_reduce(std::span(values), MPI_MAX);
        Difference largest;
        std::size_t i = 0;
        for (const auto& [name, _] : alone.parameters()) largest.include({values[i++], name});
        return largest;
    }

    /// Steps on all ranks, and in --benchmark in turn on rank 0 alone; what they send, against the formula.
    bool measure() {
        const std::string optimizer = s_.optimizer == "sgd" ? "sgd" : "adamw";
        Trainer together(s_, text_, optimizer, ranks_);
        std::unique_ptr<Trainer> alone;
        if (s_.benchmark && world_.size() > 1 && world_.rank() == 0)
            alone = std::make_unique<Trainer>(s_, text_, optimizer, one_);
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
                   (shape.width * (4 * shape.layers + 2) + 3) * (s_.dtype == "float64" ? 8 : 4);
        const double n = world_.size(), seconds = median(seconds_);
        say("\n%-8s %10s %12s %18s %12s\n%-8s %10.3f %12.3f %18.0f %12.0f\n", "a step", "ms", "in messages",
            "bytes a rank sends", "formula", "", seconds * 1e3, median(blocked_) * 1e3, double(counted_) / n,
            double(formula_) / n);
        say("%.0f tokens/s, %.1f GFLOP/s\n", s_.tokens() / seconds, flop() / seconds / 1e9);
        if (s_.benchmark && world_.size() > 1)
            say("%.2f times as fast as one rank alone, in turn with it\n", median(speed_up));
        return world_.all_reduce(int(counted_ == formula_), MPI_MIN) == 1;
    }
    double flop() const { return s_.tokens() * s_.shape().flop_per_token(s_.sequence); }

    Record record(bool right) const {
        char mpi[MPI_MAX_LIBRARY_VERSION_STRING] = "";
        int length = 0;
        MPI_Get_library_version(mpi, &length);
        const std::string mpi_line(mpi, std::string_view(mpi, length).find_first_of("\n,"));
        Record line, versions;
        versions.add("mpi", mpi_line).add("torch", TORCH_VERSION).add("compiler", __VERSION__);
        line.add("strategy", "tp").add("implementation", "tp_libtorch").add("language", "libtorch");
        line.add("ranks", world_.size()).add("backend", "mpi").add("dtype", s_.dtype).add("model", s_.model);
        line.add("parameters", numbers_).add("tokens_per_step", std::int64_t(s_.tokens()));
        line.add("flop_per_step", flop()).add("steps", s_.steps).add("step_seconds", seconds_);
        line.add("communication_seconds", median(blocked_));
        line.add("bytes_counted", double(counted_) / world_.size());
        line.add("bytes_formula", double(formula_) / world_.size());
        line.add("peak_memory_bytes", peak_memory_bytes()).add("scaling", "strong");
        if (s_.benchmark)
            line.add("equal", nullptr).add("largest_difference", nullptr);
        else
            line.add("equal", right).add("largest_difference", largest_);
        return line.add("versions", versions);
    }

    const Communicator& world_;
    const RanksPtr ranks_, one_;
    const Settings& s_;
    const Text& text_;
    std::int64_t numbers_ = 0, mine_ = 0, counted_ = 0, formula_ = 0;  // bytes: of a rank, times the ranks
    std::vector<double> seconds_, blocked_;
    double largest_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    fived::Environment mpi(argc, argv, MPI_THREAD_MULTIPLE);  // the process group has a thread of its own
    if (!std::getenv("OMP_NUM_THREADS")) at::set_num_threads(1);
    const Communicator world = Communicator::world();
    Settings settings;
    return run_training_lesson(world, "tp_libtorch", argc, argv, settings, [&](const Text& text) {
        return Lesson(world, world_process_group(), settings, text).run();
    });
}
