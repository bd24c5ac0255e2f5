// main() of the lessons on LibTorch, and the difference of two runs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "fived/lesson/equality.hpp"
#include "fived/lesson/lesson.hpp"
#include "fived/torch/ranks.hpp"
#include "fived/torch/torch.hpp"
#include "process_group.hpp"

namespace fived {

/// Of a tensor of the serial run, of what this rank has of both runs, and of the serial run whose weights were moved.
inline Compared compared(const std::string& name, const at::Tensor& whole, const at::Tensor& expected,
                         const at::Tensor& ours, const at::Tensor& moved) {
    const at::NoGradGuard no_grad;
    const auto size_of = [](const at::Tensor& t) { return t.numel() ? t.abs().max().item<double>() : 0; };
    Compared found{name};
    if (!whole.defined() || !ours.defined()) {
        if (whole.defined() != ours.defined()) found.apart = INFINITY;
        return found;
    }
    found.size = size_of(whole), found.apart = distance(size_of(expected - ours), 0);
    found.unit = moved.defined() ? distance(size_of(whole - moved), 0) : INFINITY;
    return found;
}

/// Moves every weight by one unit in the last place, up or down at random.
inline void move_by_an_ulp(const std::vector<at::Tensor>& weights) {
    const at::NoGradGuard no_grad;
    at::Generator draw = at::detail::createCPUGenerator(0);
    for (const at::Tensor& w : weights) {
        const at::Tensor up_or_down = at::randint(2, w.sizes(), draw, w.options()) * 2 - 1;
        w.copy_(at::nextafter(w, up_or_down * INFINITY));
    }
}

template <class Settings>
class TorchLesson : protected LessonBase<Settings> {
  protected:
    TorchLesson(const Communicator& world, const Settings& settings)
        : LessonBase<Settings>(world, settings, "libtorch") {
        this->versions_.add("torch", TORCH_VERSION);
    }
    double epsilon() const { return this->element() == 8 ? 0x1p-52 : 0x1p-23; }
    Difference largest(const std::vector<Compared>& list, double tolerance) const {
        return largest_difference(this->world_, list, share_of_largest(epsilon(), tolerance));
    }
    Difference in_ulps(const std::vector<Compared>& list) const {
        return largest_in_ulps(this->world_, list, epsilon());
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
