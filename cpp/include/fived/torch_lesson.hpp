// main() of the lessons on LibTorch, and the difference of two runs.
#pragma once

#include <torch/all.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "fived/equality.hpp"
#include "fived/lesson.hpp"
#include "fived/ranks.hpp"
#include "process_group.hpp"

namespace fived {

/// A tensor of the serial run, and of both runs what of it this rank has.
struct Compared {
    std::string name;
    at::Tensor whole, expected, ours;
};

/// Tensor by tensor max |expected - ours| / max |whole|, the largest of all ranks. A tensor that is zero up to rounding is
/// measured on the model's scale, as in common/equality.py. Collective.
inline Difference largest_difference(const Communicator& world, const std::vector<Compared>& list) {
    const at::NoGradGuard no_grad;
    const double none = std::numeric_limits<double>::infinity();
    const auto size_of = [](const at::Tensor& t) { return t.numel() ? t.abs().max().item<double>() : 0; };
    double model_size = 0;
    for (const Compared& c : list)
        if (c.whole.defined()) model_size = std::max(model_size, size_of(c.whole));
    std::vector<double> values;
    for (const Compared& c : list) {
        if (!c.whole.defined() || !c.ours.defined()) {
            values.push_back(c.whole.defined() == c.ours.defined() ? 0 : none);
            continue;
        }
        const double rounding = c.whole.scalar_type() == at::kDouble ? 0x1p-52 : 0x1p-23;
        const double size = size_of(c.whole), apart = size_of(c.expected - c.ours);
        const double scale = size > 64 * rounding * model_size ? size : model_size;
        values.push_back(std::isfinite(apart) && apart > 0 ? apart / scale : apart == 0 ? 0 : none);
    }
    world.all_reduce(std::span(values), MPI_MAX);
    Difference largest;
    for (std::size_t i = 0; i < values.size(); ++i) largest.include({values[i], list[i].name});
    return largest;
}

template <class Settings>
class TorchLesson : protected LessonBase<Settings> {
  protected:
    TorchLesson(const Communicator& world, const Settings& settings)
        : LessonBase<Settings>(world, settings, "libtorch") {
        this->versions_.add("torch", TORCH_VERSION);
    }
};

/// main() of a lesson on LibTorch: Lesson(world, group, settings).run().
template <class Settings, class Lesson>
int run_torch_lesson(const char* name, int argc, char** argv) {
    if (!std::getenv("OMP_NUM_THREADS")) at::set_num_threads(1);
    const auto body = [](const Communicator& world, const Settings& settings) {
        const Group group = world_process_group();
        return Lesson(world, group, settings).run();
    };
    return run_lesson<Settings>(name, argc, argv, body,
                                MPI_THREAD_MULTIPLE);  // the group has a thread of its own
}

}  // namespace fived
