// Pipeline parallelism with no Python in it but the schedules' generators, which are asked once at the start: torch's autograd
// and optimizers, this course's process groups on MPI.
//
//   mpirun -np 3 pp_libtorch                      trains GPT-2 on real text by every schedule, and compares with one device
//   mpirun -np 2 pp_libtorch --benchmark          times the steps beside those of one rank alone
//   mpirun -np 2 pp_libtorch --list schedule.txt  runs what stands there, one line a rank
#include <memory>
#include <string>

#include "fived/torch/training_lesson.hpp"
#include "settings.hpp"
#include "trainer.hpp"

namespace {

using namespace fived;

class Lesson : TrainingLesson<Settings, Trainer> {
  public:
    Lesson(const Communicator& world, const Group& group, const Settings& settings)
        : TrainingLesson(world, settings),
          up_(c10::make_intrusive<Ranks>(group)),
          down_(c10::make_intrusive<Ranks>(world_process_group("down"))) {}

    bool run() {
        const Trainer whole(s_, OptimizerKind::sgd);
        for (const auto& [_, tensor] : whole.parameters()) numbers_ += tensor.numel();
        say("pp_libtorch: %s, %d layers, %lld parameters, %s, %d rank(s), batch %d x %d, %s (%.1f MB)\n",
            name_of(s_.model), s_.shape().layers, (long long)numbers_, name_of(s_.dtype), world_.size(),
            s_.batch, s_.sequence, s_.text.name.c_str(), s_.megabytes());
        const auto compare_all = [&](OptimizerKind optimizer) {
            Trainer alone(s_, optimizer), moved(s_, optimizer);
            return compare(optimizer, alone, moved, trainers(optimizer),
                           [](const std::string&, const at::Tensor& whole) { return whole; });
        };
        const auto measure_all = [&] {
            const OptimizerKind optimizer = s_.timed_optimizer();
            return measure(
                trainers(optimizer), [&] { return std::make_unique<Trainer>(s_, optimizer); },
                [&](std::size_t i) { return bytes_by_formula(s_.schedules[i].second); });
        };
        const bool right = prove("training in stages on", compare_all, measure_all);
        for (const Timed& timed : timed_) append(record_of(timed, "pp", "pp_libtorch-" + timed.name));
        return right;
    }

  private:
    /// One for each schedule.
    Trainers trainers(OptimizerKind optimizer) const {
        Trainers list;
        for (const auto& [name, schedule] : s_.schedules)
            list.emplace_back(name, std::make_unique<Trainer>(s_, optimizer, schedule, up_, down_));
        return list;
    }
    /// What this rank sends in a step, times the ranks: B S D numbers for each side on which a stage has a neighbour on another
    /// rank, the gradient of the embedding that two ranks hold, and the loss.
    std::int64_t bytes_by_formula(const Schedule& schedule) const {
        const Gpt2Shape shape = s_.shape();
        const std::int64_t n = world_.size(), me = world_.rank(), D = shape.width;
        std::int64_t numbers = 0;
        for (int stage = 1; stage < schedule.stages(); ++stage) {
            const int a = schedule.owner[stage - 1], b = schedule.owner[stage];
            if (a != b && (a == me || b == me)) numbers += std::int64_t(s_.tokens()) * D;
        }
        const int first = schedule.owner.front(), last = schedule.owner.back();
        if (first != last && (first == me || last == me)) numbers += shape.vocabulary * D;
        return (n * numbers + 2 * (n - 1)) * std::int64_t(element());
    }

    const RanksPtr up_, down_;
};

}  // namespace

int main(int argc, char** argv) {
    return run_torch_lesson<Settings, Lesson>("pp_libtorch", argc, argv);
}
