// Tensor parallelism with no Python in it: torch's autograd and optimizers, this course's process group on MPI.
//
//   mpirun -np 4 tp_libtorch                trains GPT-2 on real text, split over all ranks and on one, and compares
//   mpirun -np 2 tp_libtorch --benchmark    times the steps beside those of one rank alone
#include <string>

#include "fived/torch/training_lesson.hpp"
#include "settings.hpp"
#include "trainer.hpp"

namespace {

using namespace fived;

class Lesson : OneWayLesson<Settings, Trainer> {
  public:
    using OneWayLesson::OneWayLesson;

    bool run() {
        const Parameters whole = s_.shape().initial(s_.seed, s_.type());
        std::int64_t mine = 0;
        for (const auto& [_, tensor] : whole) numbers_ += tensor.numel();
        for (const auto& [_, tensor] : split(whole, *ranks_)) mine += tensor.numel();
        say("tp_libtorch: %s, %lld parameters (%lld on a rank), %s, %d rank(s), batch %d x %d, %s (%.1f "
            "MB)\n",
            name_of(s_.model), (long long)numbers_, (long long)world_.all_reduce(mine, MPI_MAX),
            name_of(s_.dtype), world_.size(), s_.batch, s_.sequence, s_.text.name.c_str(), s_.megabytes());
        const auto piece = [&](const std::string& name, const at::Tensor& whole) {
            return piece_of(whole, split_dimension(name), *ranks_);
        };
        return prove_and_time("training split over", "tp", "tp_libtorch", piece,
                              [&](const Trainer&) { return bytes_by_formula(); });
    }

  private:
    /// What this rank sends in a step, times the ranks: two sums of x a layer forward and two backward, one each for embedding
    /// and head, three numbers a token for the loss.
    std::int64_t bytes_by_formula() const {
        const Gpt2 shape = s_.shape();
        return 2 * (world_.size() - 1) * std::int64_t(s_.tokens()) *
               (shape.width * (4 * shape.layers + 2) + 3) * std::int64_t(element());
    }
};

}  // namespace

int main(int argc, char** argv) {
    return run_torch_lesson<Settings, Lesson>("tp_libtorch", argc, argv);
}
