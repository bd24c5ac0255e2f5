// mpirun -np 4 ep_mpi                           trains a mixture of experts on all ranks and on one, and compares them
// mpirun -np 2 ep_mpi --benchmark --balanced    times the layer beside one rank, every expert with as many tokens
#include <array>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "ep_mpi.hpp"
#include "fived/lesson/equality.hpp"
#include "fived/lesson/lesson.hpp"
#include "fived/math/random.hpp"

namespace {

using namespace fived;

/// A layer's experts and weights: Mixtral's, or Switch's.
enum class Kind { mixtral, switch_transformer };
constexpr auto names(Kind) {
    return std::array{"mixtral", "switch"};
}

struct Settings : LessonSettings {
    MoEShape shape{
        .width = 40, .mlp_width = 53, .experts = 7, .experts_per_token = 2};  // uneven on 2, 3, 4 ranks
    std::size_t tokens = 131;
    std::optional<Kind> kind;                // none: both, one after the other
    std::optional<OptimizerKind> optimizer;  // likewise
    bool balanced = false;

    Settings() { steps = 3; }
    /// What --benchmark starts from; experts 3.5 times as wide as the layer, as Mixtral's.
    void prefer_benchmark() {
        shape = {.width = 512, .mlp_width = 1792, .experts = 8, .experts_per_token = 2};
        tokens = 4096, steps = 5, dtype = Dtype::float32, kind = Kind::mixtral;
    }
    Options options() {
        Options options("Expert parallelism by MPI, a mixture of experts. Run it under mpirun.");
        const std::size_t one = 1;
        options.add("width", shape.width, one, "of a token");
        options.add("mlp-width", shape.mlp_width, one, "of an expert");
        options.add("experts", shape.experts, one, "of all ranks together; at least as many as ranks");
        options.add("experts-per-token", shape.experts_per_token, one, "that a token chooses");
        options.add("tokens", tokens, one, "a step, of all ranks together");
        options.add("kind", kind, "both",
                    "SwiGLU and weights renormalised, or GELU with biases and softmax over all experts");
        options.add("optimizer", optimizer, "both", "what to train with");
        options.flag("balanced", balanced,
                     "tokens take the experts in turn, for equal load, not by the router");
        add_to(options, "steps of training, and rounds that are timed", "of weights and tokens", "",
               "time the layer, compare nothing; with --help: its own defaults");
        return options;
    }
    void check(std::size_t ranks) const {
        const std::string E = std::to_string(shape.experts);
        if (shape.experts_per_token > shape.experts)
            throw UsageError("--experts-per-token " + std::to_string(shape.experts_per_token) +
                             ": a token cannot choose that many of " + E + " experts; give 1 to " + E);
        if (ranks > shape.experts)
            throw UsageError("--experts " + E + " is too few for " + std::to_string(ranks) +
                             " ranks; use at most " + E + " ranks, or at least --experts " +
                             std::to_string(ranks));
    }
};

template <class T>
class Lesson : LessonBase<Settings> {
  public:
    Lesson(const Communicator& world, const Settings& settings)
        : LessonBase(world, settings), mine_(range(settings.tokens, world.size(), world.rank())) {
        for (auto* work : {&x_, &target_, &y_, &dy_, &dx_}) work->resize(s_.tokens * s_.shape.width);
    }

    bool run() {
        say("ep_mpi: a mixture of %zu experts, %zu a token, width %zu, experts' width %zu, %zu tokens, %s, "
            "%d "
            "rank(s)\n",
            s_.shape.experts, s_.shape.experts_per_token, s_.shape.width, s_.shape.mlp_width, s_.tokens,
            name_of(s_.dtype), world_.size());
        bool right = s_.benchmark || prove();
        right &= measure();
        if (!s_.benchmark) say_verdict(right);
        append(record_of());
        return right;
    }

  private:
    struct Timed {
        std::vector<double> seconds{}, permutation{}, communication{};
    };
    MoEShape shape_of(Kind kind) const {
        MoEShape shape = s_.shape;
        shape.activation = kind == Kind::mixtral ? Activation::swiglu : Activation::gelu;
        shape.router = kind == Kind::mixtral ? Weights::renormalised : Weights::softmax;
        return shape;
    }
    /// Of --kind both, the one that is timed.
    Kind timed_kind() const { return s_.kind.value_or(Kind::mixtral); }
    MatrixView<T> view(std::vector<T>& work, const Range& tokens) const {
        return {work.data() + tokens.begin * s_.shape.width, tokens.length, s_.shape.width};
    }

    /// Input and target of a step: normal numbers, the same on every rank.
    void draw(int step) {
        for (std::size_t i = 0; i < x_.size(); ++i) {
            x_[i] = T(normal(s_.seed, 2 * step, i));
            target_[i] = T(normal(s_.seed, 2 * step + 1, i));
        }
    }
    /// sum (y - target)^2 / 2 of these tokens over the number of all tokens, and its gradients.
    double loss_and_gradients(ExpertParallelLayer<T>& layer, const Range& tokens) {
        layer.forward(view(x_, tokens), view(y_, tokens));
        double loss = 0;
        const std::size_t D = s_.shape.width;
        for (std::size_t i = tokens.begin * D; i < tokens.end() * D; ++i) {
            const T difference = y_[i] - target_[i];
            loss += double(difference) * double(difference);
            dy_[i] = difference / T(s_.tokens);
        }
        layer.backward(view(dy_, tokens), view(dx_, tokens));
        return loss / 2 / double(s_.tokens);
    }

    /// Both kinds of mixture with both optimizers.
    bool prove() {
        say("\nlargest relative difference from one device, %d steps; bytes of all ranks in the last\n"
            "%-14s %8s %8s %8s %8s %8s %9s %9s\n",
            s_.steps, "", "loss", "norm", "dx", "gradient", "weights", "counted", "formula");
        bool right = true;
        for (const Kind kind : values_of<Kind>()) {
            if (s_.kind && s_.kind != kind) continue;
            if (s_.optimizer != OptimizerKind::adamw) right &= compare<Sgd>(kind);
            if (s_.optimizer != OptimizerKind::sgd) right &= compare<AdamW<T>>(kind);
        }
        return right;
    }

    /// Trains on all ranks, and serially on every rank, and compares after each step.
    template <class Optimizer>
    bool compare(Kind kind) {
        const MoEShape shape = shape_of(kind);
        const std::string name = name_of(Optimizer::kind);
        ExpertParallelLayer<T> ours(shape, s_.seed, &world_), serial(shape, s_.seed, nullptr);
        ours.balanced = serial.balanced = s_.balanced;
        ours.first_token = mine_.begin;
        Optimizer our_optimizer, serial_optimizer;
        Difference loss, norm, input, gradient;
        std::array<std::uint64_t, 2> bytes{};
        bool counted = true;
        for (int step = 0; step < s_.steps; ++step) {
            draw(step);
            const double serial_loss = loss_and_gradients(serial, {0, s_.tokens});
            const std::vector<T> serial_dx = dx_;
            loss.include(
                largest_difference(world_, serial_loss, world_.all_reduce(loss_and_gradients(ours, mine_))));
            bytes = {ours.bytes_sent(), bytes_by_choices(ours, serial.choices())};
            counted &= bytes[0] == bytes[1];
            const Parameter rows{"dx", mine_.begin * shape.width, mine_.length, shape.width};
            input.include(largest_difference<T>(world_, {&rows, 1}, serial_dx, dx_, tolerance()));
            norm.include(largest_difference(world_, serial.gradient_norm(), ours.gradient_norm()));
            gradient.include(difference(serial, serial.gradients(), ours, ours.gradients(), tolerance()));
            ours.step(our_optimizer);
            serial.step(serial_optimizer);
        }
        const Difference weight = difference(serial, serial.weights(), ours, ours.weights(), tolerance());
        counted = everywhere(counted);
        world_.all_reduce(std::span<std::uint64_t>(bytes));
        say("%-14s %8.1e %8.1e %8.1e %8.1e %8.1e %9zu %9zu  (%s; %s)\n",
            (std::string(name_of(kind)) + ", " + name).c_str(), loss.value, norm.value, input.value,
            gradient.value, weight.value, std::size_t(bytes[0]), std::size_t(bytes[1]), gradient.name.c_str(),
            weight.name.c_str());
        return counted & within("", name, tolerance(),
                                {loss.value, norm.value, input.value, gradient.value, weight.value});
    }

    /// This rank's bytes, from the experts that the tokens of all ranks chose in the serial run.
    std::size_t bytes_by_choices(const ExpertParallelLayer<T>& layer,
                                 std::span<const std::uint32_t> choices) const {
        std::size_t sent = 0, received = 0;
        for (std::size_t k = 0; k < choices.size(); ++k) {
            const std::size_t token = k / s_.shape.experts_per_token;
            const bool from_here = token >= mine_.begin && token < mine_.end();
            const bool to_here = choices[k] >= layer.experts().begin && choices[k] < layer.experts().end();
            sent += from_here && !to_here, received += to_here && !from_here;
        }
        return layer.bytes_by_formula(sent, received);
    }

    /// The largest of all ranks and parameters, this rank's parts of the serial run beside them.
    Difference difference(const ExpertParallelLayer<T>& serial, std::span<const T> whole,
                          const ExpertParallelLayer<T>& ours, std::span<const T> parts,
                          double tolerance) const {
        std::vector<T> expected;
        std::vector<Parameter> named;
        for (std::size_t n = 0; n < ours.parameters().size(); ++n) {
            const StackedParameter& part = ours.parameters()[n];
            const auto here = whole.subspan(serial.parameters()[n].offset + part.place(0), part.size());
            expected.insert(expected.end(), here.begin(), here.end());
            named.push_back(part);
        }
        return largest_difference<T>(world_, named, expected, parts, tolerance);
    }

    /// Forward and backward in turn: of all tokens on one rank, and on all ranks.
    bool measure() {
        draw(0);
        const MoEShape shape = shape_of(timed_kind());
        ExpertParallelLayer<T> serial(shape, s_.seed, nullptr), ours(shape, s_.seed, &world_);
        ours.balanced = serial.balanced = s_.balanced;
        ours.first_token = mine_.begin;
        for (int round = -1; round < s_.steps; ++round)
            for (const bool alone : {true, false}) {
                world_.barrier();
                const Timer timer;
                ExpertParallelLayer<T>& layer = alone ? serial : ours;
                if (!alone) loss_and_gradients(layer, mine_);
                if (alone && world_.rank() == 0) loss_and_gradients(layer, {0, s_.tokens});
                std::array<double, 3> took{timer.seconds(), layer.permutation_seconds(),
                                           layer.communication_seconds()};
                world_.all_reduce(std::span<double>(took), MPI_MAX);
                if (round < 0) continue;
                Timed& timed = alone ? alone_ : together_;
                timed.seconds.push_back(took[0]);
                timed.permutation.push_back(took[1]);
                timed.communication.push_back(took[2]);
            }
        std::vector<std::uint32_t> choices(s_.tokens * shape.experts_per_token);
        const std::size_t K = shape.experts_per_token;
        std::ranges::copy(ours.choices(), choices.begin() + mine_.begin * K);
        world_.all_reduce(std::span(choices), MPI_MAX);  // of others they are 0
        counted_ = ours.bytes_sent(), formula_ = bytes_by_choices(ours, choices);
        load_ = double(world_.all_reduce(std::uint64_t(ours.load()), MPI_MAX)) * world_.size() /
                double(choices.size());
        show();
        return everywhere(counted_ == formula_);
    }

    /// Of all products, forward and backward.
    double flop() const {
        const double matrices = timed_kind() == Kind::switch_transformer ? 2 : 3, D = double(s_.shape.width);
        const double experts = double(s_.shape.experts_per_token) * matrices * double(s_.shape.mlp_width);
        return 6 * double(s_.tokens) * D * (experts + double(s_.shape.experts));
    }

    void show() const {
        say("\nforward and backward, %d rounds in turn; the slowest rank's rows over the mean: %.2f\n"
            "%-9s %9s %7s %22s %15s %9s %9s\n",
            s_.steps, load_, "", "ms", "spread", "permute and combine", "blocked in MPI", "GFLOP/s",
            "speed-up");
        for (const Timed* timed : {&alone_, &together_}) {
            const double ms = median(timed->seconds) * 1e3, permutation = median(timed->permutation) * 1e3;
            const auto [least, most] = std::ranges::minmax(timed->seconds);
            const std::string name =
                timed == &alone_ ? "one rank" : std::to_string(world_.size()) + " rank(s)";
            say("%-9s %9.3f %6.0f%% %12.3f ms, %4.1f%% %12.3f ms %9.1f %9.2f\n", name.c_str(), ms,
                (most - least) / ms * 1e5, permutation, permutation / ms * 100,
                median(timed->communication) * 1e3, flop() / ms / 1e6, ratio(alone_.seconds, timed->seconds));
        }
        say("bytes rank 0 sent: %zu counted, %zu by formula\n", counted_, formula_);
    }

    Record record_of() const {
        const MoEShape& shape = s_.shape;
        Record line = record("ep", s_.balanced ? "ep_mpi-balanced" : "ep_mpi", "");
        line.add("model", "mixture-" + std::to_string(shape.width) + "-" + std::to_string(shape.mlp_width) +
                              "-" + std::to_string(shape.experts_per_token) + "of" +
                              std::to_string(shape.experts));
        line.add("parameters", shape_of(timed_kind()).parameters());
        line.add("tokens_per_step", s_.tokens).add("flop_per_step", flop());
        line.add("step_seconds", together_.seconds);
        line.add("communication_seconds", median(together_.communication));
        line.add("permutation_seconds", median(together_.permutation)).add("slowest_over_mean_rows", load_);
        return line.add("bytes_counted", counted_).add("bytes_formula", formula_);
    }

    const Range mine_;  // this rank's tokens
    std::vector<T> x_, target_, y_, dy_, dx_;
    Timed alone_, together_;
    std::size_t counted_ = 0, formula_ = 0;
    double load_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    return run_mpi_lesson<Settings, Lesson>("ep_mpi", argc, argv);
}
