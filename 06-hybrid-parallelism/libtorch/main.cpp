// Five strategies with no Python in it but the schedules' generators, which are asked once at the start: torch's autograd and
// optimizers, this course's process groups on MPI.
//
//   mpirun -np 8 hybrid_libtorch --pp 2 --dp 2 --tp 2                      trains GPT-2 on the mesh and on one device, and compares
//   mpirun -np 8 hybrid_libtorch --model mixtral-tiny --ep 2 --sp 2 --tp 2
//   mpirun -np 4 hybrid_libtorch --train --dp 2 --tp 2 --save f            trains as train_llama.py does; --resume f goes on, on any mesh
//   mpirun -np 2 hybrid_libtorch --tp 2 --benchmark                        times the steps beside those of one rank alone
#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fived/torch/training_lesson.hpp"
#include "run.hpp"
#include "settings.hpp"
#include "trainer.hpp"

namespace {

using namespace fived;

class Lesson : TrainingLesson<Settings, Trainer> {
  public:
    Lesson(const Communicator& world, const Group&, const Settings& settings)
        : TrainingLesson(world, settings),
          mesh_(settings.mesh(), world.rank(),
                [](const GroupOf& group) {
                    return group.ranks.empty() ? Group() : process_group(group.name(), group.ranks);
                }),
          one_({1, 1, 1, 1, 1}, 0, {}) {}

    bool run() {
        numbers_ = s_.shape().parameter_count();
        say("hybrid_libtorch: %s, %lld parameters, %s, %d rank(s), %s, batch %d x %d, %s (%.1f MB)\n",
            name_of(s_.model), (long long)numbers_, name_of(s_.dtype), world_.size(), title().c_str(),
            s_.batch, s_.sequence, s_.text.name.c_str(), s_.megabytes());
        if (s_.train) return train_run();
        const auto compare_all = [&](OptimizerKind optimizer) {
            Trainer alone(s_, optimizer, one_), moved(s_, optimizer, one_);
            const Trainers trainers = together(optimizer);
            const Trainer& ours = *trainers[0].second;
            return compare(
                optimizer, alone, moved, trainers,
                [&](const std::string& name, const at::Tensor& whole) { return ours.piece(name, whole); });
        };
        const auto measure_all = [&] {
            const OptimizerKind optimizer = s_.timed_optimizer();
            const Trainers trainers = together(optimizer);
            const bool right = measure(
                trainers, [&] { return std::make_unique<Trainer>(s_, optimizer, one_); },
                [&](std::size_t) { return formula(*trainers[0].second); });
            show_axes(trainers[0].second->sent());
            return everywhere(agree_) && right;
        };
        const bool right = prove("training on the mesh of", compare_all, measure_all);
        Record line = record_of(timed_[0], "hybrid", "hybrid_libtorch");
        append(line.add("mesh", title()).add("bytes_by_axes", by_axes_));
        return right;
    }

  private:
    bool train_run() {
        RunModel model(s_, mesh_);
        return TrainingRun(world_, s_).train(model, title());
    }
    std::string title() const {
        std::string text;
        for (const Axis axis : every_axis)
            if (mesh_.size(axis) > 1)
                text += (text.empty() ? "" : " ") + std::string(name_of(axis)) + "=" +
                        std::to_string(mesh_.size(axis));
        return text.empty() ? "1 rank" : text;
    }
    Trainers together(OptimizerKind optimizer) {
        Trainers list;
        list.emplace_back("", std::make_unique<Trainer>(s_, optimizer, mesh_));
        return list;
    }
    /// Bytes of the last step, those of each group compared with what was counted. Collective.
    std::int64_t formula(const Trainer& trainer) {
        expected_ = StepBytes(trainer.hybrid(), mesh_, s_, rows(trainer.hybrid().counts())).all();
        Bytes counted = trainer.sent();
        std::erase_if(counted, [](const auto& item) { return item.second == 0; });
        agree_ &= counted == expected_;
        std::int64_t all = 0;
        for (const auto& [_, bytes] : expected_) all += bytes;
        return all;
    }
    /// Rows that went to experts of other ranks along ep, and those that came for this rank's, in all passes. Collective.
    std::int64_t rows(const std::vector<at::Tensor>& passes) const {
        const std::int64_t n = world_.size(), E = s_.shape().experts;
        if (!E) return 0;
        std::vector<double> chosen_nE(std::size_t(n * E), 0);  // whole numbers
        for (const at::Tensor& counts_E : passes)
            for (std::int64_t e = 0; e < E; ++e)
                chosen_nE[std::size_t(world_.rank() * E + e)] += counts_E[e].item<double>();
        world_.all_reduce(std::span(chosen_nE), MPI_SUM);
        const std::int64_t me = mesh_.at(Axis::ep), apart = s_.sp * s_.tp, first = world_.rank() - me * apart;
        double moved = 0;
        for (std::int64_t owner = 0, e = 0; owner < s_.ep; ++owner)
            for (const std::int64_t end = e + experts_of(E, s_.ep, int(owner)); e < end; ++e)
                for (std::int64_t from = 0; from < s_.ep; ++from)
                    if (from != owner && (from == me || owner == me))
                        moved += chosen_nE[std::size_t((first + from * apart) * E + e)];
        return std::int64_t(moved);
    }
    /// Means over the ranks.
    void show_axes(const Bytes& counted) {
        const double n = world_.size();
        say("%-16s %22s %12s\n", "along", "bytes a rank, mean", "formula");
        std::vector<std::string> names;
        for (const Axes& axes :
             {Axes{Axis::pp}, Axes{Axis::dp}, Axes{Axis::ep}, Axes{Axis::sp}, Axes{Axis::tp}})
            names.push_back(words(axes));
        for (const auto& [name, sizes] : s_.shape().parameters()) {
            const Axes axes = place(name, sizes, s_.shape(), mesh_, s_.sequence_parallel).gradient_axes();
            if (std::ranges::count(names, words(axes)) == 0) names.push_back(words(axes));
        }
        for (const std::string& name : {words(token_axes), words(every_axis)})
            if (std::ranges::count(names, name) == 0) names.push_back(name);
        for (const std::string& name : names) {
            const auto mean = [&](const Bytes& bytes) {
                const auto found = bytes.find(name);
                return double(world_.all_reduce(found == bytes.end() ? std::int64_t{0} : found->second)) / n /
                       n;
            };
            const double sent = mean(counted), by_formula = mean(expected_);
            if (sent == 0 && by_formula == 0) continue;
            say("%-16s %22.0f %12.0f\n", name.c_str(), sent, by_formula);
            by_axes_.add(name, sent);
        }
    }

    Mesh mesh_, one_;
    Bytes expected_;
    Record by_axes_;
    bool agree_ = true;
};

}  // namespace

int main(int argc, char** argv) {
    return run_torch_lesson<Settings, Lesson>("hybrid_libtorch", argc, argv);
}
