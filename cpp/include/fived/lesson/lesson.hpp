// What every lesson's binary does: agree on the options, run, turn errors into one line and an exit code, keep a record.
#pragma once

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "fived/error.hpp"
#include "fived/lesson/agree.hpp"
#include "fived/lesson/options.hpp"
#include "fived/lesson/record.hpp"
#include "fived/math/blas.hpp"
#include "fived/math/dtype.hpp"
#include "fived/mpi/environment.hpp"
#include "fived/mpi/mpi.hpp"
#include "fived/named.hpp"

namespace fived {

/// Whether --batch is that of all ranks together, or of each.
enum class Scaling { strong, weak };
constexpr auto names(Scaling) {
    return std::array{"strong", "weak"};
}

/// What all command lines have. A lesson's own Settings add options(), prefer_benchmark(), what --benchmark starts from,
/// prefer_train() where there is --train, and check(ranks), or check(world) where ranks have to agree, which throws UsageError for what cannot work.
struct LessonSettings {
    int steps = 5;
    std::uint64_t seed = 0;
    Dtype dtype = Dtype::float64;
    Scaling scaling = Scaling::strong;
    std::string json;
    bool benchmark = false;

    /// These members as the command line names them; they must outlive `options`. The rest is help.
    void add_to(Options& options, const std::string& steps_are, const std::string& seed_is,
                const std::string& each, const std::string& benchmark_does) {
        options.add("steps", steps, 1, steps_are);
        options.add("seed", seed, std::uint64_t{0}, seed_is);
        options.add("dtype", dtype, "arithmetic");
        options.add("json", json, "append a record" + each + " to this file");
        options.flag("benchmark", benchmark, benchmark_does);
    }
};

/// What a lesson's class stands on.
template <class Settings>
class LessonBase {
  protected:
    LessonBase(const Communicator& world, const Settings& settings, const char* language = "cpp-mpi")
        : world_(world), s_(settings), language_(language) {
        char mpi[MPI_MAX_LIBRARY_VERSION_STRING] = "";
        int length = 0;
        MPI_Get_library_version(mpi, &length);
        const std::string_view text(mpi, length);
        versions_.add("mpi", std::string(text.substr(0, text.find_first_of("\n,"))));
        versions_.add("compiler", __VERSION__);
    }

    /// printf on rank 0.
    template <class... Values>
    void say(const char* format, Values... values) const {
        if (world_.rank() > 0) return;
        if (std::printf(format, values...) < 0 || std::fflush(stdout))
            throw UsageError(std::string("the output cannot be written: ") + std::strerror(errno));
    }
    /// What came of the proof of equality and of bytes.
    void say_verdict(bool right) const {
        say(right ? "\nproved: training on %d rank(s) equals training on one, bytes counted = formula.\n"
                  : "\nWRONG: training on %d rank(s) differs from training on one, or bytes counted from the "
                    "formula.\n",
            world_.size());
    }
    bool everywhere(bool right) const { return world_.all_reduce(int(right), MPI_MIN) == 1; }
    /// Bytes of a number.
    std::size_t element() const { return s_.dtype == Dtype::float64 ? 8 : 4; }
    /// Of sums in another order, as in common/lesson/equality.py.
    double tolerance() const { return s_.dtype == Dtype::float64 ? 1e-12 : 1e-5; }
    /// Whether no difference is larger than `most`. The version's record keeps the largest with each optimizer ("" where
    /// there is none). in_ulps: refused from 100 on, as in common/lesson/equality.py.
    bool within(const std::string& version, const std::string& optimizer, double most,
                std::initializer_list<double> differences, double in_ulps = 0) {
        Found& found = found_[version];
        const double largest = std::max(differences);
        double& kept = found.largest[optimizer];
        kept = std::max(kept, largest);
        const bool right = largest <= most && in_ulps < 100;
        found.equal &= right;
        return right;
    }
    /// What all records say; the lesson adds its model and what it measured. version: as within() was told. Collective.
    Record record(const std::string& strategy, const std::string& implementation,
                  const std::string& version) const {
        Record record;
        record.add("strategy", strategy).add("implementation", implementation).add("language", language_);
        record.add("ranks", world_.size()).add("backend", "mpi").add("dtype", name_of(s_.dtype));
        record.add("steps", s_.steps).add("scaling", name_of(s_.scaling)).add("versions", versions_);
        record.add("peak_memory_bytes", world_.all_reduce(peak_memory_bytes(), MPI_MAX));
        const auto found = found_.find(version);
        if (found == found_.end()) return record.add("equal", nullptr).add("largest_difference", nullptr);
        double largest = 0;
        Record differences;
        for (const auto& [optimizer, value] : found->second.largest) {
            largest = std::max(largest, value);
            differences.add(optimizer, value);
        }
        record.add("equal", found->second.equal).add("largest_difference", largest);
        return found->second.largest.contains("") ? record : record.add("differences", differences);
    }
    /// To the file of --json.
    void append(const Record& record) const {
        if (!s_.json.empty() && world_.rank() == 0) record.append_to(s_.json);
    }

    const Communicator& world_;
    const Settings& s_;
    Record versions_;

  private:
    struct Found {
        std::map<std::string, double> largest{};  // by optimizer
        bool equal = true;
    };
    const char* language_;
    std::map<std::string, Found> found_;  // by version
};

/// Whether a fault of this message says that there is no memory for the sizes: the words of common/lesson/runner.py.
inline bool is_no_memory(const std::exception& error, std::string_view message) {
    if (dynamic_cast<const std::bad_alloc*>(&error) || dynamic_cast<const std::length_error*>(&error))
        return true;
    const auto words = {"can't allocate memory", "Storage size calculation overflowed", "out of memory"};
    return std::ranges::any_of(words, [&](const char* w) { return message.find(w) != message.npos; });
}

/// main() of a lesson; `body(world, settings)` returns whether all was right. Exit codes: 0 right; 1 wrong, or an error
/// that ends all ranks; 2 unusable input, said once, before any rank communicates, or later where only then it shows:
/// sizes for which there is no memory, an output that cannot be written. --help prints the options.
template <class Settings, class Body>
int run_lesson(const char* name, int argc, char** argv, Body body, int threads = MPI_THREAD_FUNNELED) {
    const Environment mpi(argc, argv, threads);
    std::signal(SIGPIPE, SIG_IGN);  // a closed pipe is an error of printf
    const Communicator world = Communicator::world();
    const auto given = [&](std::string_view option) {
        return std::find(argv + 1, argv + argc, option) != argv + argc;
    };
    Settings settings;
    if (given("--benchmark")) settings.prefer_benchmark();
    if constexpr (requires { settings.prefer_train(); })
        if (given("--train")) settings.prefer_train();
    const Options options = settings.options();
    if (given("--help")) {
        if (world.rank() > 0 || (std::fputs(options.help().c_str(), stdout) >= 0 && !std::fflush(stdout)))
            return 0;
        std::fprintf(stderr, "%s: the output cannot be written: %s\n", name, std::strerror(errno));
        return 2;
    }
    try {
        agreed(world, [&] {
            options.parse(argc, argv);
            if constexpr (requires { settings.check(world); })
                settings.check(world);
            else
                settings.check(world.size());
            if (!settings.json.empty() && world.rank() == 0) check_writable(settings.json);
        });
        return body(world, std::as_const(settings)) ? 0 : 1;
    } catch (const AgreedError& error) {
        if (*error.what()) std::fprintf(stderr, "%s: %s\n", name, error.what());
        return 2;
    } catch (const std::exception& error) {
        const std::string whole = error.what();
        const std::string line = whole.substr(0, whole.find('\n'));  // LibTorch adds its stack
        const bool large = is_no_memory(error, line);
        const int code = large || dynamic_cast<const UsageError*>(&error) ? 2 : 1;
        const std::string said =
            large ? "there is not enough memory for these sizes; give smaller ones (" + line + ")" : whole;
        std::fprintf(stderr, "%s: rank %d: %s\n", name, world.rank(), said.c_str());
        std::fflush(nullptr);
        MPI_Abort(MPI_COMM_WORLD, code);
        return code;
    }
}

/// main() of a lesson without torch: Lesson<double>(world, settings).run(), or Lesson<float>, as --dtype says.
template <class Settings, template <class> class Lesson>
int run_mpi_lesson(const char* name, int argc, char** argv) {
    return run_lesson<Settings>(name, argc, argv, [](const Communicator& world, const Settings& settings) {
        if (world.size() > 1 && !std::getenv("OMP_NUM_THREADS")) set_blas_threads(1);
        return with_type(settings.dtype, [&]<class T>() { return Lesson<T>(world, settings).run(); });
    });
}

}  // namespace fived
