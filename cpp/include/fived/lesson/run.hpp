// A training run as train_llama.py of chapter 06 makes it: the same samples in the same order, the same learning rates, AdamW
// with decay on matrices and embeddings alone, clipped gradients. So either goes on from what the other has saved.
//
//     rate(t) / largest     0 ____/‾‾‾-.__                up in a line for `warm_up` steps, then along half a cosine to
//                                        ‾-.___           `final` at the last one
//                             warm_up          steps
//
// The only state is the weights, those of the optimizer, and the number of the step.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <numbers>
#include <string>
#include <system_error>
#include <vector>

#include "fived/lesson/checkpoint.hpp"
#include "fived/lesson/lesson.hpp"
#include "fived/lesson/options.hpp"
#include "fived/lesson/text.hpp"
#include "fived/math/partition.hpp"
#include "fived/math/sha256.hpp"

namespace fived {

struct RunSettings {
    bool train = false;
    std::string save, resume;
    int save_every = 100, warm_up = 10, log_every = 10;
    double learning_rate = 1e-3, final = 0.1, weight_decay = 0.1, clip = 0;

    void add_run_to(Options& options) {
        options.flag("train", train,
                     "train as train_llama.py does, compare nothing; with --help: its own defaults");
        options.add("save", save,
                    "a safetensors file for what --train has learnt, with the optimizer's state");
        options.add("save-every", save_every, 0,
                    "steps from one --save to the next, beside the one at the end; 0: that alone");
        options.add("resume", resume, "the file of a --save from which --train goes on, on any mesh");
        options.add("learning-rate", learning_rate, 0., "the largest of --train");
        options.add("warm-up", warm_up, 0, "steps of --train in which the learning rate grows");
        options.add("final", final, 0., "the last learning rate of --train, as a share of the largest");
        options.add("weight-decay", weight_decay, 0., "AdamW's in --train, on matrices and embeddings");
        options.add("clip", clip, 0., "largest norm of the gradient; 0: no clipping");
        options.add("log-every", log_every, 1, "steps from one line of --train to the next");
    }
    /// Throws UsageError for what does not go together.
    void check_run(const LessonSettings& others, bool adamw) const {
        if (!train && !(save.empty() && resume.empty()))
            throw UsageError("--save and --resume go with --train, which compares nothing; give that, too");
        if (train && others.benchmark) throw UsageError("--train and --benchmark exclude each other");
        if (train && !adamw)
            throw UsageError("--train trains with AdamW; give --optimizer adamw, or leave it out");
    }
    double rate(int step, int steps) const {
        if (step < warm_up) return learning_rate * (step + 1) / warm_up;
        const double done = double(step - warm_up) / std::max(1, steps - 1 - warm_up);
        return learning_rate *
               (final + (1 - final) * (1 + std::cos(std::numbers::pi * std::min(done, 1.0))) / 2);
    }
};

/// Whether weight decay acts on a parameter: on all but norms and biases.
inline bool decays(const std::string& name) {
    return name.ends_with("weight") && name.find("norm") == name.npos;
}

/// The hash of the hashes of the text's parts, as hybrid_data.py computes it.
inline std::string sha256_of(const Text& text) {
    constexpr std::size_t parts = 64;
    std::string hashes;
    for (const auto* tokens : {&text.train, &text.validation})
        for (std::size_t i = 0; i < parts; ++i) {
            const std::size_t begin = cut(tokens->size(), parts, i);
            hashes += sha256({tokens->data() + begin, cut(tokens->size(), parts, i + 1) - begin}).hex();
        }
    return sha256({reinterpret_cast<const std::uint8_t*>(hashes.data()), hashes.size()}).hex();
}

/// A Model has
///     double backward(int step)              leaves the gradients of the step's batch; returns its loss; collective
///     double clip(double largest)            scales them to that norm, if it is larger; returns it; collective
///     void update(double rate)               a step of AdamW; collective
///     std::vector<Piece> pieces()            weights and states, which are made where there are none yet
///     void restored()                        the pieces have been read; throws UsageError; collective
template <class Settings>
class TrainingRun : LessonBase<Settings> {
    using LessonBase<Settings>::s_, LessonBase<Settings>::world_, LessonBase<Settings>::say;

  public:
    TrainingRun(const Communicator& world, const Settings& settings)
        : LessonBase<Settings>(world, settings) {}

    /// All steps from the one that --resume has reached. Returns whether all numbers were finite. Collective.
    template <class Model>
    bool train(Model& model, const std::string& mesh) {
        check_output();
        int step = s_.resume.empty() ? 0 : resume(model);
        this->append(
            Record().add("kind", "run").add("step", step).add("mesh", mesh).add("ranks", world_.size()));
        if (step > 0) say("resumed after step %d of %d from %s\n", step, s_.steps, s_.resume.c_str());
        if (step == s_.steps)
            say("nothing is left to do; more --steps than %d go on\n", step);
        else
            say("  step     loss   gradient norm   learning rate   tokens/s\n");
        Timer timer;
        for (int logged = step; step < s_.steps;) {
            const double rate = s_.rate(step, s_.steps), loss = model.backward(step);
            const double norm = model.clip(s_.clip > 0 ? s_.clip : std::numeric_limits<double>::infinity());
            if (!std::isfinite(loss + norm)) return give_up(step + 1, loss, norm);
            model.update(rate);
            ++step;
            if (step % s_.log_every == 0 || step == s_.steps) {
                log(step, loss, norm, rate, (step - logged) * s_.tokens() / timer.seconds());
                logged = step, timer = Timer();
            }
            const bool due = step == s_.steps || (s_.save_every && step % s_.save_every == 0);
            if (due && !s_.save.empty()) save(model, step);
        }
        return true;
    }

  private:
    /// What must be equal for a resumed run to see the very next batch. Collective.
    Metadata samples() const {
        std::string hash;
        if (world_.rank() == 0) hash = sha256_of(s_.text);
        world_.broadcast(hash);
        return {{"seed", std::to_string(s_.seed)},
                {"batch", std::to_string(s_.batch)},
                {"sequence", std::to_string(s_.sequence)},
                {"data", s_.text.name},
                {"data_tokens", std::to_string(s_.text.train.size() + s_.text.validation.size())},
                {"data_sha256", hash}};
    }
    void check_output() const {
        if (s_.save.empty()) return;
        std::string problem;
        if (world_.rank() == 0) problem = NewFile(s_.save).problem();
        agree(world_, problem);
    }
    /// Returns the number of steps that the file has behind it.
    template <class Model>
    int resume(Model& model) const {
        std::vector<Piece> pieces = model.pieces();
        Checkpoint checkpoint(world_, s_.resume, pieces);
        const Metadata here = samples();
        int step = 0;
        agreed(world_, [&] { step = check(checkpoint.metadata(), here); });
        checkpoint.read(pieces);
        agreed(world_, [&] { model.restored(); });
        return step;
    }
    int check(Metadata there, const Metadata& here) const {
        for (const auto& [name, value] : here)
            if (there[name] != value)
                throw UsageError(
                    s_.resume + " is of a run with " + name + " '" + there[name] + "', this one has '" +
                    value + "', so the order of the samples cannot go on; give the same, or another file");
        int step = -1;
        const std::string& text = there["step"];
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), step);
        if (error != std::errc() || end != text.data() + text.size() || step < 0)
            throw UsageError(s_.resume + " does not say how many steps it has behind it");
        if (step > s_.steps)
            throw UsageError(s_.resume + " is of step " + text + ", beyond --steps " +
                             std::to_string(s_.steps) + "; give at least " + text + ", or another file");
        return step;
    }
    /// A file that cannot be written ends the run at its last step; before, training goes on.
    template <class Model>
    void save(Model& model, int step) const {
        Metadata about = samples();
        about["step"] = std::to_string(step);
        try {
            fived::save(world_, s_.save, about, model.pieces());
            say("saved after step %d: %s\n", step, s_.save.c_str());
        } catch (const AgreedError& error) {
            if (step == s_.steps) throw;
            if (*error.what()) std::fprintf(stderr, "warning: %s\n", error.what());
        }
    }
    void log(int step, double loss, double norm, double rate, double speed) const {
        say("%6d  %7.4f   %13.4f   %13.2e   %8.0f\n", step, loss, norm, rate, speed);
        Record line;
        line.add("kind", "step").add("step", step).add("loss", loss).add("gradient_norm", norm);
        this->append(line.add("learning_rate", rate).add("tokens_per_second", speed));
    }
    bool give_up(int step, double loss, double norm) const {
        if (world_.rank() == 0)
            std::fprintf(stderr,
                         "error: in step %d the loss (%g) or the gradient (norm %g) is not finite; it "
                         "changed no weight\n",
                         step, loss, norm);
        return false;
    }
};

}  // namespace fived
