// mpirun -np 4 tp_mpi                trains a Transformer layer on all ranks and on one, and compares them
// mpirun -np 2 tp_mpi --benchmark    times the steps beside one rank, and without the all-reduces
#include <array>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "fived/lesson/equality.hpp"
#include "fived/lesson/lesson.hpp"
#include "fived/math/random.hpp"
#include "tp_mpi.hpp"

namespace {

using namespace fived;

struct Settings : LessonSettings {
    LayerShape shape{.width = 80, .heads = 5, .mlp_width = 323};  // uneven on 2, 3 and 4 ranks
    std::size_t batch = 3, sequence = 17;
    std::optional<OptimizerKind> optimizer;  // none: both, one after the other

    Settings() { steps = 3; }
    /// What --benchmark starts from.
    void prefer_benchmark() {
        shape = {.width = 768, .heads = 12, .mlp_width = 3072};
        batch = 4, sequence = 256, steps = 7, dtype = Dtype::float32;
        optimizer = OptimizerKind::adamw;
    }
    Options options() {
        Options options("Tensor parallelism by MPI, a Transformer layer. Run it under mpirun.");
        const std::size_t one = 1;
        options.add("width", shape.width, one, "of the residual stream");
        options.add("heads", shape.heads, one, "of the attention; they divide --width");
        options.add("mlp-width", shape.mlp_width, one, "hidden width of the MLP");
        options.add("batch", batch, one, "samples a step; every rank sees all of them");
        options.add("sequence", sequence, one, "tokens of a sample");
        options.add("optimizer", optimizer, "both", "what to train with");
        add_to(options, "steps of training, and rounds that are timed", "of weights and samples",
               " of each way to sum", "time the steps, compare nothing; with --help: its own defaults");
        return options;
    }
    void check(std::size_t ranks) const {
        const std::size_t D = shape.width, H = shape.heads, below = D / H * H,
                          most = std::min(H, shape.mlp_width);
        if (D % H)
            throw UsageError("--width " + std::to_string(D) + " does not divide into " + std::to_string(H) +
                             " heads; " + (below ? std::to_string(below) + " or " : "") +
                             std::to_string(below + H) + " would");
        if (most < ranks)
            throw UsageError("--heads " + std::to_string(H) + " --mlp-width " +
                             std::to_string(shape.mlp_width) + " cannot be split over " +
                             std::to_string(ranks) + " ranks; use at most " + std::to_string(most) +
                             ", or at least " + std::to_string(ranks) + " of each");
    }
};

/// As tables print it.
const char* title_of(Reduction reduction) {
    return reduction == Reduction::mpi ? "MPI" : "ring";
}

template <class T>
class Lesson : LessonBase<Settings> {
  public:
    Lesson(const Communicator& world, const Settings& settings)
        : LessonBase(world, settings), tokens_(settings.batch * settings.sequence) {
        for (auto* work : {&x_, &target_, &y_, &dy_, &dx_}) work->resize(tokens_ * s_.shape.width);
    }

    bool run() {
        say("tp_mpi: a Transformer layer, width %zu, %zu heads, MLP %zu, %zu parameters, batch %zu x %zu, "
            "%s, "
            "%d rank(s)\n",
            s_.shape.width, s_.shape.heads, s_.shape.mlp_width, s_.shape.parameters(), s_.batch, s_.sequence,
            name_of(s_.dtype), world_.size());
        bool right = s_.benchmark || prove();
        right &= measure();
        if (!s_.benchmark) say_verdict(right);
        for (const Timed& timed : timed_)
            if (timed.sums) append(record_of(timed));
        return right;
    }

  private:
    struct Timed {
        std::string name;
        std::optional<Reduction> sums{};  // none: there are no sums
        std::vector<double> seconds{}, communication{};
        std::size_t counted = 0, formula = 0;
    };

    MatrixView<T> view(std::vector<T>& work) const { return {work.data(), tokens_, s_.shape.width}; }

    /// Input and target of a step: normal numbers, the same on every rank.
    void draw(int step) {
        for (std::size_t i = 0; i < x_.size(); ++i) {
            x_[i] = T(normal(s_.seed, 2 * step, i));
            target_[i] = T(normal(s_.seed, 2 * step + 1, i));
        }
    }
    /// sum (y - target)^2 / 2 over the number of tokens, and its gradients. Every rank has all of y: no sum
    /// over ranks.
    double loss_and_gradients(TensorParallelLayer<T>& layer) {
        layer.forward(view(x_), s_.sequence, view(y_));
        double loss = 0;
        for (std::size_t i = 0; i < y_.size(); ++i) {
            const T difference = y_[i] - target_[i];
            loss += double(difference) * double(difference);
            dy_[i] = difference / T(tokens_);
        }
        layer.backward(view(dy_), view(dx_));
        return loss / 2 / double(tokens_);
    }

    /// Sums by MPI and by our ring, with both optimizers.
    bool prove() {
        say("\nlargest relative difference from one device, %d steps\n%-14s %8s %8s %8s %8s  %s\n", s_.steps,
            "", "loss", "norm", "dx", "gradient", "weights");
        bool right = true;
        for (const Reduction reduction : values_of<Reduction>()) {
            if (s_.optimizer != OptimizerKind::adamw) right &= compare<Sgd>(reduction);
            if (s_.optimizer != OptimizerKind::sgd) right &= compare<AdamW<T>>(reduction);
        }
        return right;
    }

    /// Trains on all ranks, and serially on every rank, and compares after each step.
    template <class Optimizer>
    bool compare(Reduction reduction) {
        const std::string sums = title_of(reduction);
        TensorParallelLayer<T> ours(s_.shape, s_.seed, &world_, reduction),
            serial(s_.shape, s_.seed, nullptr);
        Optimizer our_optimizer, serial_optimizer;
        Difference loss, norm, input, gradient, weight;
        bool counted = true;
        for (int step = 0; step < s_.steps; ++step) {
            draw(step);
            const double serial_loss = loss_and_gradients(serial);
            const std::vector<T> serial_dx = dx_;
            loss.include(largest_difference(world_, serial_loss, loss_and_gradients(ours)));
            counted &= ours.bytes_sent() == ours.bytes_by_formula(tokens_);
            const Parameter whole{"dx", 0, tokens_, s_.shape.width};
            input.include(largest_difference<T>(world_, {&whole, 1}, serial_dx, dx_, tolerance()));
            norm.include(largest_difference(world_, serial.gradient_norm(), ours.gradient_norm()));
            gradient.include(difference(serial, serial.gradients(), ours, ours.gradients(), tolerance()));
            ours.step(our_optimizer);
            serial.step(serial_optimizer);
        }
        weight = difference(serial, serial.weights(), ours, ours.weights(), tolerance());
        say("%-14s %8.1e %8.1e %8.1e %8.1e  %.1e  (%s; %s)\n",
            (std::string(title_of(Optimizer::kind)) + ", " + sums).c_str(), loss.value, norm.value,
            input.value, gradient.value, weight.value, gradient.name.c_str(), weight.name.c_str());
        return everywhere(counted) &
               within(sums, name_of(Optimizer::kind), tolerance(),
                      {loss.value, norm.value, input.value, gradient.value, weight.value});
    }

    /// The largest of all ranks and parameters, this rank's parts of the serial run beside them.
    Difference difference(const TensorParallelLayer<T>& serial, std::span<const T> a,
                          const TensorParallelLayer<T>& ours, std::span<const T> b, double tolerance) const {
        std::vector<Compared> list;
        for (std::size_t n = 0; n < ours.parameters().size(); ++n) {
            const Shard &whole = serial.parameters()[n], &part = ours.parameters()[n];
            Compared& compared = list.emplace_back(Compared{part.name});
            for (std::size_t i = 0; i < part.size(); ++i)
                compared.include(double(a[whole.offset + part.place(i)]), double(b[part.offset + i]));
        }
        return largest_difference(world_, list, share_of_largest<T>(tolerance));
    }

    /// Whole steps with AdamW, in turn: on one rank, split without sums, and with them by MPI and by our
    /// ring.
    bool measure() {
        draw(0);
        TensorParallelLayer<T> serial(s_.shape, s_.seed, nullptr), alone(s_.shape, s_.seed, &world_),
            mpi(s_.shape, s_.seed, &world_), ring(s_.shape, s_.seed, &world_, Reduction::ring);
        alone.communicate = false;
        std::array<AdamW<T>, 4> optimizers;
        const std::array<TensorParallelLayer<T>*, 4> layers{&serial, &alone, &mpi, &ring};
        timed_ = {{"one rank"},
                  {"no sums"},
                  {title_of(Reduction::mpi), Reduction::mpi},
                  {title_of(Reduction::ring), Reduction::ring}};
        bool right = true;
        for (int round = -1; round < s_.steps; ++round)
            for (std::size_t i = 0; i < layers.size(); ++i) {
                world_.barrier();
                const Timer timer;
                if (i > 0 || world_.rank() == 0)
                    loss_and_gradients(*layers[i]), layers[i]->step(optimizers[i]);
                const double seconds = world_.all_reduce(timer.seconds(), MPI_MAX);
                const double communication = world_.all_reduce(layers[i]->communication_seconds(), MPI_MAX);
                Timed& timed = timed_[i];
                timed.counted = layers[i]->bytes_sent(), timed.formula = layers[i]->bytes_by_formula(tokens_);
                if (timed.sums) right &= everywhere(timed.counted == timed.formula);
                if (round >= 0)
                    timed.seconds.push_back(seconds), timed.communication.push_back(communication);
            }
        show();
        return right;
    }

    /// Of all products forward and backward, the masked half of the attention counted as it is computed.
    double flop() const {
        const double D = double(s_.shape.width), F = double(s_.shape.mlp_width);
        return 3 * double(tokens_) * (2 * (4 * D * D + 2 * D * F) + 4 * double(s_.sequence) * D);
    }

    void show() const {
        const std::vector<double>&one_rank = timed_[0].seconds, &ceiling = timed_[1].seconds;
        say("\nforward, backward and AdamW, %d rounds in turn\n%-9s %11s   %-11s %9s %9s %9s %9s %9s\n",
            s_.steps, "", "bytes sent", "formula", "ms", "in sums", "GFLOP/s", "speed-up", "/ no sums");
        for (const Timed& timed : timed_) {
            if (timed.sums)
                say("%-9s %11zu %s %-11zu", timed.name.c_str(), timed.counted,
                    timed.counted == timed.formula ? "=" : "!=", timed.formula);
            else
                say("%-9s %25s", timed.name.c_str(), "");
            say(" %9.3f %9.3f %9.1f %9.2f %9.2f\n", median(timed.seconds) * 1e3,
                median(timed.communication) * 1e3, flop() / median(timed.seconds) / 1e9,
                ratio(one_rank, timed.seconds), ratio(timed.seconds, ceiling));
        }
    }

    Record record_of(const Timed& timed) const {
        Record line = record("tp", timed.sums == Reduction::mpi ? "tp_mpi" : "tp_mpi-ring", timed.name);
        line.add("model", "layer-" + std::to_string(s_.shape.width) + "-" + std::to_string(s_.shape.heads) +
                              "-" + std::to_string(s_.shape.mlp_width));
        line.add("parameters", s_.shape.parameters())
            .add("tokens_per_step", tokens_)
            .add("flop_per_step", flop());
        line.add("step_seconds", timed.seconds).add("communication_seconds", median(timed.communication));
        return line.add("bytes_counted", timed.counted).add("bytes_formula", timed.formula);
    }

    const std::size_t tokens_;
    std::vector<T> x_, target_, y_, dy_, dx_;
    std::vector<Timed> timed_;
};

}  // namespace

int main(int argc, char** argv) {
    return run_mpi_lesson<Settings, Lesson>("tp_mpi", argc, argv);
}
