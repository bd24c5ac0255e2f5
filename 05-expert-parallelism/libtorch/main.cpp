// Expert parallelism with no Python in it: torch's autograd and optimizers, this course's process group on MPI.
//
//   mpirun -np 4 ep_libtorch                trains a mixture of experts on real text, on all ranks and on one, and compares
//   mpirun -np 3 ep_libtorch --router softmax --experts-per-token 1       Switch; 8 experts on 3 ranks: 3, 3 and 2
//   mpirun -np 2 ep_libtorch --benchmark    times the steps beside those of one rank alone
#include <span>
#include <string>
#include <vector>

#include "fived/torch/training_lesson.hpp"
#include "settings.hpp"
#include "trainer.hpp"

namespace {

using namespace fived;

class Lesson : OneWayLesson<Settings, Trainer> {
  public:
    using OneWayLesson::OneWayLesson;

    bool run() {
        count_parameters();
        say("ep_libtorch: %s, %d experts a layer, %d a token, %lld parameters (%lld on a rank), %s, %d "
            "rank(s), "
            "batch %d x %d, %s (%.1f MB)\n",
            name_of(s_.model), s_.experts, s_.experts_per_token, (long long)numbers_,
            (long long)world_.all_reduce(mine_, MPI_MAX), name_of(s_.dtype), world_.size(), s_.batch,
            s_.sequence, s_.text.name.c_str(), s_.megabytes());
        const auto piece = [&](const std::string& name, const at::Tensor& whole) {
            return piece_of(whole, name, *ranks_);
        };
        return prove_and_time("training with the experts over", "ep", "ep_libtorch", piece,
                              [&](Trainer& trainer) { return bytes_by_formula(trainer.take_counts()); });
    }

  private:
    void count_parameters() {
        const Trainer trainer(s_, OptimizerKind::sgd, ranks_);
        for (const auto& [name, tensor] : trainer.parameters())
            (is_expert(name) ? mine_ : dense_) += tensor.numel();
        numbers_ = dense_ + world_.all_reduce(mine_);
        mine_ += dense_;
    }
    /// What this rank sends in a step, times the ranks, from what every rank's tokens chose: dense gradients and the loss, all
    /// summed; the counts for others' experts; the rows that leave and those that come, forward and backward. Collective.
    std::int64_t bytes_by_formula(const std::vector<at::Tensor>& passes) const {
        const std::int64_t n = world_.size(), me = world_.rank(), E = s_.experts;
        std::vector<double> chosen_nE(std::size_t(n * E), 0);  // whole numbers
        for (const at::Tensor& counts_E : passes)
            for (std::int64_t e = 0; e < E; ++e)
                chosen_nE[std::size_t(me * E + e)] += counts_E[e].item<double>();
        world_.all_reduce(std::span(chosen_nE), MPI_SUM);
        std::int64_t rows = 0;
        for (std::int64_t owner = 0, e = 0; owner < n; ++owner)
            for (const std::int64_t end = e + experts_of(E, int(n), int(owner)); e < end; ++e)
                for (std::int64_t from = 0; from < n; ++from)
                    if (from != owner && (from == me || owner == me))
                        rows += std::int64_t(chosen_nE[std::size_t(from * E + e)]);
        const std::int64_t others = E - experts_of(E, int(n), int(me)), calls = std::int64_t(passes.size());
        return 2 * (n - 1) * (dense_ + 1) * std::int64_t(element()) +
               n * (8 * calls * others + 2 * rows * s_.shape().width * std::int64_t(element()));
    }

    std::int64_t mine_ = 0, dense_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    return run_torch_lesson<Settings, Lesson>("ep_libtorch", argc, argv);
}
