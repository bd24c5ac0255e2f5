// mpirun -np 4 dp_mpi                trains an MLP on real text, on all ranks and on one, and compares them
// mpirun -np 2 dp_mpi --benchmark    times the steps
#include <cstdio>
#include <string>
#include <vector>

#include "dp_mpi.hpp"
#include "fived/equality.hpp"
#include "fived/lesson.hpp"
#include "fived/record.hpp"
#include "fived/text.hpp"

namespace {

using namespace fived;

struct Settings {
    int steps = 3, batch = 53, context = 16, hidden = 256, layers = 3, micro_batches = 2;
    std::uint64_t seed = 0;
    double bucket_mb = 0.25;
    std::string dtype = "float64", optimizer = "both", scaling = "strong", data, json;
    bool benchmark = false;

    /// What --benchmark starts from: large enough that a step is mostly arithmetic.
    void prefer_benchmark() {
        steps = 10, batch = 4096, hidden = 1024, layers = 4, micro_batches = 1, bucket_mb = 2;
        dtype = "float32", optimizer = "adamw", scaling = "weak";
    }
    Options options() {
        Options options("Data parallelism by MPI, an MLP on bytes of text. Run it under mpirun.");
        options.add("steps", steps, 1, "steps of training");
        options.add("seed", seed, std::uint64_t{0}, "of weights and samples");
        options.add("dtype", dtype, {"float64", "float32"}, "arithmetic");
        options.add("batch", batch, 1, "samples a step: of all ranks, with weak scaling of each");
        options.add("context", context, 1, "bytes before the one to predict");
        options.add("hidden", hidden, 1, "width of the hidden layers");
        options.add("layers", layers, 1, "linear layers");
        options.add("micro-batches", micro_batches, 1, "parts in which a rank works off its samples");
        options.add("bucket-mb", bucket_mb, 1e-5, "MiB of gradients that travel together");
        options.add("optimizer", optimizer, {"both", "sgd", "adamw"}, "what to train with");
        options.add("data", data, "a file or folder of text instead of Python's standard library");
        options.add("json", json, "append a record of the run to this file");
        options.flag("benchmark", benchmark,
                     "time the steps, compare nothing; with --help: its own defaults");
        options.add("scaling", scaling, {"strong", "weak"}, "what --batch means");
        return options;
    }
    std::vector<int> sizes() const {
        std::vector<int> sizes(layers + 1, hidden);
        sizes.front() = 8 * context;
        sizes.back() = 256;
        return sizes;
    }
    std::size_t bucket_bytes() const { return std::size_t(bucket_mb * (1 << 20)); }
    std::size_t global_batch(int ranks) const { return std::size_t(batch) * (scaling == "weak" ? ranks : 1); }
    void check(int ranks, const Text& text) const {
        const std::size_t least = std::size_t(ranks) * micro_batches;
        if (global_batch(ranks) < least)
            throw UsageError("--batch " + std::to_string(batch) + " is too small for " +
                             std::to_string(ranks) + " ranks x " + std::to_string(micro_batches) +
                             " micro-batches; at least " +
                             std::to_string(scaling == "weak" ? std::size_t(micro_batches) : least));
        if (std::size_t(context) >= text.train.size())
            throw UsageError("--context " + std::to_string(context) + " is longer than the text; at most " +
                             std::to_string(text.train.size() - 1));
    }
};

/// Samples [begin, end) of the global batch of a step.
template <class T>
struct Batch {
    std::vector<T> x;
    std::vector<std::uint8_t> y;
    MatrixView<const T> x_BI;

    Batch(const Text& text, const Settings& settings, int step, std::size_t begin, std::size_t end)
        : x((end - begin) * 8 * settings.context), y(end - begin) {
        const MatrixView<T> view(x.data(), end - begin, 8 * settings.context);
        mlp_samples<T>(text.train, settings.seed, step, begin, view, y);
        x_BI = view;
    }
};

template <class T>
class Lesson {
  public:
    Lesson(const Communicator& world, const Settings& settings, const Text& text)
        : world_(world), settings_(settings), text_(text), global_(settings.global_batch(world.size())) {
        begin_ = cut(global_, world.size(), world.rank());
        end_ = cut(global_, world.size(), world.rank() + 1);
    }

    bool run() {
        bool right = true;
        DataParallelMlp<T> model = parallel(Reduction::overlapped);
        say("dp_mpi: MLP %s, %zu parameters, %s, %d rank(s), batch %zu, %s (%.1f MB)\n", model_name().c_str(),
            model.mlp().weights().size(), settings_.dtype.c_str(), world_.size(), global_, text_.name.c_str(),
            double(text_.train.size()) / 1e6);
        if (!settings_.benchmark) {
            say("\nlargest relative difference from the serial run, %d steps\n%-21s %8s %8s %8s  %s\n",
                settings_.steps, "", "loss", "norm", "gradient", "weights");
            if (settings_.optimizer != "adamw") {
                right &= compare<Sgd>("SGD, MPI_Iallreduce", Reduction::overlapped, tolerance());
                right &= compare<Sgd>("SGD, our ring", Reduction::ring, tolerance());
            }
            // AdamW divides by |gradient|: float32's rounding of a gradient near 0 moves a weight visibly.
            if (settings_.optimizer != "sgd")
                right &= compare<AdamW<T>>("AdamW, MPI_Iallreduce", Reduction::overlapped,
                                           sizeof(T) == 8 ? tolerance() : 1e-2);
            say("\n");
        }
        right &= count_bytes();
        measure(model);
        if (!settings_.benchmark)
            say("\n%s: training on %d rank(s) %s training on one.\n", right ? "Proved" : "WRONG",
                world_.size(), right ? "equals" : "differs from");
        if (!settings_.json.empty() && world_.rank() == 0) record(model, right).append_to(settings_.json);
        return right;
    }

  private:
    template <class... Values>
    void say(const char* format, Values... values) const {
        if (world_.rank() == 0) std::printf(format, values...), std::fflush(stdout);
    }
    // Sums in another order, nothing else.
    static constexpr double tolerance() { return sizeof(T) == 8 ? 1e-12 : 1e-5; }

    DataParallelMlp<T> parallel(Reduction reduction) const {
        return {settings_.sizes(), settings_.seed, &world_, settings_.bucket_bytes(), reduction};
    }

    /// Trains on all ranks, and serially on every rank, and compares after each step.
    template <class Optimizer>
    bool compare(const char* title, Reduction reduction, double tolerance) {
        DataParallelMlp<T> ours = parallel(reduction);
        DataParallelMlp<T> serial(settings_.sizes(), settings_.seed, nullptr, settings_.bucket_bytes());
        Optimizer our_optimizer, serial_optimizer;
        Difference loss, norm, gradient, weight;
        const auto difference = [&](std::span<const T> a, std::span<const T> b) {
            return largest_difference<T>(world_, serial.mlp().parameters(), a, b);
        };
        for (int step = 0; step < settings_.steps; ++step) {
            const Batch<T> mine(text_, settings_, step, begin_, end_),
                all(text_, settings_, step, 0, global_);
            const double our_loss =
                ours.loss_and_gradients(mine.x_BI, mine.y, global_, settings_.micro_batches);
            const double serial_loss = serial.loss_and_gradients(all.x_BI, all.y, global_);
            loss.include({world_.all_reduce(relative_difference(serial_loss, our_loss), MPI_MAX), ""});
            norm.include({world_.all_reduce(relative_difference(serial.gradient_norm(), ours.gradient_norm()),
                                            MPI_MAX),
                          ""});
            gradient.include(difference(serial.mlp().gradients(), ours.mlp().gradients()));
            ours.step(our_optimizer);
            serial.step(serial_optimizer);
        }
        weight = difference(serial.mlp().weights(), ours.mlp().weights());
        say("%-21s %8.1e %8.1e %8.1e  %.1e  (%s; %s)\n", title, loss.value, norm.value, gradient.value,
            weight.value, gradient.name.c_str(), weight.name.c_str());
        const double largest = std::max({loss.value, norm.value, gradient.value, weight.value});
        largest_ = std::max(largest_, largest);
        return largest <= tolerance;
    }

    /// One backward pass with our own ring, whose messages we see, against the formula of the cost.
    bool count_bytes() {
        DataParallelMlp<T> model = parallel(Reduction::ring);
        const Batch<T> mine(text_, settings_, 0, begin_, end_);
        model.loss_and_gradients(mine.x_BI, mine.y, global_, settings_.micro_batches);
        counted_ = model.bytes_sent();
        formula_ =
            ring_all_reduce_bytes(model.mlp().gradients().size(), sizeof(T), world_.size(), world_.rank());
        const bool equal = world_.all_reduce(int(counted_ == formula_), MPI_MIN);
        say("bytes a step and rank (ring): counted %zu %s formula 2(n-1)/n G = %zu\n", counted_,
            equal ? "=" : "!=", formula_);
        return equal;
    }

    void measure(DataParallelMlp<T>& model) {
        AdamW<T> adamw;
        Sgd sgd;
        const Batch<T> mine(text_, settings_, 0, begin_, end_);
        std::vector<double> exposed;
        const int warm_up = 2;
        for (int step = -warm_up; step < settings_.steps; ++step) {
            world_.barrier();
            const Timer timer;
            model.loss_and_gradients(mine.x_BI, mine.y, global_, settings_.micro_batches);
            settings_.optimizer == "sgd" ? model.step(sgd) : model.step(adamw);
            const double seconds = world_.all_reduce(timer.seconds(), MPI_MAX);
            if (step < 0) continue;
            seconds_.push_back(seconds);
            exposed.push_back(world_.all_reduce(model.exposed_seconds(), MPI_MAX));
        }
        exposed_ = median(exposed);
        memory_ = world_.all_reduce(peak_memory_bytes(), MPI_MAX);
        const double seconds = median(seconds_);
        say("time a step: %.3f ms, of it in MPI %.3f ms; %.1f GFLOP/s, %.0f samples/s\n", seconds * 1e3,
            exposed_ * 1e3, flop(model) / seconds / 1e9, double(global_) / seconds);
    }

    double flop(DataParallelMlp<T>& model) const { return model.mlp().flop_per_sample() * double(global_); }

    std::string model_name() const {
        std::string name;
        for (const int size : settings_.sizes()) name += (name.empty() ? "" : "-") + std::to_string(size);
        return name;
    }

    Record record(DataParallelMlp<T>& model, bool right) const {
        char mpi[MPI_MAX_LIBRARY_VERSION_STRING] = "";
        int length = 0;
        MPI_Get_library_version(mpi, &length);
        const std::string mpi_line(mpi, std::string_view(mpi, length).find_first_of("\n,"));
        Record line, versions;
        versions.add("mpi", mpi_line).add("compiler", __VERSION__);
        line.add("strategy", "dp").add("implementation", "dp_mpi").add("language", "cpp-mpi");
        line.add("ranks", world_.size()).add("backend", "mpi").add("dtype", settings_.dtype);
        line.add("model", "mlp-" + model_name()).add("parameters", model.mlp().weights().size());
        line.add("tokens_per_step", global_).add("flop_per_step", flop(model)).add("steps", settings_.steps);
        line.add("step_seconds", seconds_).add("communication_seconds", exposed_);
        line.add("bytes_counted", counted_).add("bytes_formula", formula_).add("peak_memory_bytes", memory_);
        line.add("scaling", settings_.scaling);
        if (settings_.benchmark)
            line.add("equal", nullptr).add("largest_difference", nullptr);
        else
            line.add("equal", right).add("largest_difference", largest_);
        return line.add("versions", versions);
    }

    const Communicator& world_;
    const Settings& settings_;
    const Text& text_;
    std::size_t global_, begin_ = 0, end_ = 0, counted_ = 0, formula_ = 0;
    std::vector<double> seconds_;
    double exposed_ = 0, largest_ = 0;
    std::int64_t memory_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    fived::Environment mpi(argc, argv);
    const Communicator world = Communicator::world();
    Settings settings;
    for (int i = 1; i < argc; ++i)
        if (std::string(argv[i]) == "--benchmark") settings.prefer_benchmark();
    const Options options = settings.options();
    Text text;
    const auto prepare = [&] {
        text = load_text(settings.data);
        settings.check(world.size(), text);
        if (!settings.json.empty() && world.rank() == 0) check_writable(settings.json);
    };
    return run_lesson(world, "dp_mpi", argc, argv, options, prepare, [&] {
        return settings.dtype == "float64" ? Lesson<double>(world, settings, text).run()
                                           : Lesson<float>(world, settings, text).run();
    });
}
