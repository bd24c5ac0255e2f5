// Ring attention with no Python in it: torch's autograd, this course's process group on MPI.
//
//   mpirun -np 4 sp_libtorch                in both orders, with both kernels, against attention on one rank
//   mpirun -np 2 sp_libtorch --benchmark    8192 tokens, 8 heads of 64, float32: time and balance of the two orders
#include <string>
#include <vector>

#include "fived/torch/lesson.hpp"
#include "settings.hpp"
#include "sp_libtorch.hpp"

namespace {

using namespace fived;

class Lesson : TorchLesson<Settings> {
  public:
    Lesson(const Communicator& world, const Group& group, const Settings& settings)
        : TorchLesson(world, settings), ranks_(c10::make_intrusive<Ranks>(group)), whole_(settings) {}

    bool run() {
        say("sp_libtorch: attention, batch %lld, %lld heads and %lld of keys, width %lld, sequence %lld, %s, "
            "%d "
            "rank(s)\n",
            (long long)s_.batch, (long long)s_.heads, (long long)s_.kv_heads, (long long)s_.head_width,
            (long long)s_.sequence, name_of(s_.dtype), world_.size());
        bool right = s_.benchmark || prove();
        right &= measure();
        if (!s_.benchmark)
            say("\n%s: attention and its gradients on %d rank(s) %s those on one.\n",
                right ? "proved" : "WRONG", world_.size(), right ? "equal" : "differ from");
        for (const Timed& timed : timed_) append(record_of(timed));
        return right;
    }

  private:
    struct Timed {
        Order order;
        std::int64_t counted = 0;
        double pairs_balance = 0;
        std::vector<double> seconds{}, blocked{}, balance{};
    };

    at::Tensor my_places(Order order) const {
        return places(s_.sequence, order, world_.rank(), world_.size());
    }
    std::int64_t bytes_by_formula() const {
        const std::int64_t s = s_.sequence / world_.size(),
                           numbers = s_.batch * s_.kv_heads * s * s_.head_width;
        return ring_bytes(2 * numbers * std::int64_t(element()), world_.size());
    }
    /// Bytes that this rank sent since the last call, and the seconds it was blocked.
    std::pair<std::int64_t, double> take_messages() {
        std::int64_t n_bytes = 0;
        double seconds = 0;
        for (const Message& m : ranks_->take_messages()) n_bytes += m.n_bytes, seconds += m.seconds;
        return {n_bytes / world_.size(), seconds};
    }

    static at::Tensor attention_on_one_rank(const Inputs& x, bool causal) {
        return at::scaled_dot_product_attention(x.q, x.k, x.v, {}, 0, causal, {}, /*enable_gqa=*/true);
    }

    /// Both orders and kernels, with the causal mask and without, against torch's attention on the whole sequence.
    bool prove() {
        say("\nlargest relative difference from one device\n%-30s %8s %8s %8s %8s %8s  %18s %10s\n", "",
            "loss", "o", "dq", "dk", "dv", "bytes a rank sends", "formula");
        bool right = true;
        for (const bool causal : {true, false}) {
            whole_.start();
            const at::Tensor o = attention_on_one_rank(whole_, causal);
            (o * whole_.w).sum().backward();
            for (const Order order : values_of<Order>())
                for (const Kernel kernel : values_of<Kernel>())
                    right &= compare(o.detach(), causal, order, kernel);
        }
        return right;
    }

    bool compare(const at::Tensor& expected, bool causal, Order order, Kernel kernel) {
        const at::Tensor mine = my_places(order);
        const Inputs x(whole_, mine);
        take_messages();
        const at::Tensor o = ring_attention(x.q, x.k, x.v, causal, ranks_, order, kernel);
        const at::Tensor loss = (o * x.w).sum();
        loss.backward();
        const std::int64_t counted = take_messages().first;
        const double sum = world_.all_reduce(loss.item<double>());
        const auto apart = [&](const at::Tensor& whole, const at::Tensor& part) {
            return largest({compared("", whole, whole.index_select(2, mine), part, {})}, tolerance()).value;
        };
        // Terms of either sign: the loss is measured on the scale of their sizes.
        const at::Tensor terms = expected * whole_.w;
        const std::vector<Compared> of_loss{
            {"loss", terms.abs().sum().item<double>(), distance(terms.sum().item<double>(), sum)}};
        const std::vector<double> values{largest(of_loss, tolerance()).value, apart(expected, o.detach()),
                                         apart(whole_.q.grad(), x.q.grad()),
                                         apart(whole_.k.grad(), x.k.grad()),
                                         apart(whole_.v.grad(), x.v.grad())};
        const std::string name =
            std::string(name_of(order)) + (causal ? ", causal, " : ", all pairs, ") + name_of(kernel);
        say("%-30s %8.1e %8.1e %8.1e %8.1e %8.1e  %18lld %10lld\n", name.c_str(), values[0], values[1],
            values[2], values[3], values[4], (long long)counted, (long long)bytes_by_formula());
        return within(name_of(order), "", tolerance(), {*std::ranges::max_element(values)}) &
               everywhere(counted == bytes_by_formula());
    }

    /// Forward and backward, causal, in both orders and on rank 0 alone, in turn.
    bool measure() {
        for (const Order order : values_of<Order>()) timed_.push_back({order});
        std::vector<Inputs> inputs;
        for (Timed& timed : timed_) {
            inputs.emplace_back(whole_, my_places(timed.order));
            timed.pairs_balance = balance(double(my_pairs(timed.order)));
        }
        std::vector<double> one_rank;
        bool right = true;
        for (int round = -1; round < s_.steps; ++round) {
            world_.barrier();
            const Timer timer;
            if (world_.rank() == 0) {
                whole_.start();
                attention_on_one_rank(whole_, true).backward(whole_.w);
            }
            const double seconds = world_.all_reduce(timer.seconds(), MPI_MAX);
            if (round >= 0) one_rank.push_back(seconds);
            for (std::size_t i = 0; i < timed_.size(); ++i) {
                Timed& timed = timed_[i];
                const Inputs& x = inputs[i];
                x.start();
                take_messages();
                world_.barrier();
                const Timer mine;
                ring_attention(x.q, x.k, x.v, true, ranks_, timed.order, s_.kernel).backward(x.w);
                const double own = mine.seconds(), slowest = world_.all_reduce(own, MPI_MAX);
                const auto [counted, blocked] = take_messages();
                const double waited = world_.all_reduce(blocked, MPI_MAX), apart = balance(own - blocked);
                timed.counted = counted;
                right &= counted == bytes_by_formula();
                if (round < 0) continue;
                timed.seconds.push_back(slowest), timed.blocked.push_back(waited),
                    timed.balance.push_back(apart);
            }
        }
        show(one_rank);
        return everywhere(right);
    }

    /// The slowest rank's share over the mean.
    double balance(double mine) const {
        return world_.all_reduce(mine, MPI_MAX) * world_.size() / world_.all_reduce(mine);
    }
    std::int64_t my_pairs(Order order) const {
        const std::int64_t s = s_.sequence / world_.size();
        std::int64_t pairs = 0;
        for (int owner = 0; owner < world_.size(); ++owner)
            pairs += work(order, true, world_.rank(), owner, s).pairs(s);
        return pairs;
    }
    /// Two products of all pairs forward and five backward, 2 K operations a pair in each.
    double flop() const {
        return 14.0 * double(s_.head_width * s_.batch * s_.heads) *
               double(s_.sequence * (s_.sequence + 1) / 2);
    }

    void show(const std::vector<double>& one_rank) const {
        say("\nforward and backward, causal, %d rounds in turn; one rank alone %.1f ms, %.1f GFLOP/s\n"
            "%-12s %18s %12s  %9s %9s %9s %9s   %s\n",
            s_.steps, median(one_rank) * 1e3, flop() / median(one_rank) / 1e9, "", "bytes a rank sends",
            "formula", "ms", "blocked", "GFLOP/s", "speed-up", "slowest rank / mean: pairs, seconds");
        for (const Timed& timed : timed_)
            say("%-12s %18lld %12lld  %9.1f %9.1f %9.1f %9.2f   %.3f, %.3f\n", name_of(timed.order),
                (long long)timed.counted, (long long)bytes_by_formula(), median(timed.seconds) * 1e3,
                median(timed.blocked) * 1e3, flop() / median(timed.seconds) / 1e9,
                ratio(one_rank, timed.seconds), timed.pairs_balance, median(timed.balance));
    }

    Record record_of(const Timed& timed) const {
        Record line = record("sp", std::string("sp_libtorch-") + name_of(timed.order), name_of(timed.order));
        line.add("model", "attention " + std::to_string(s_.batch) + " x " + std::to_string(s_.heads) + " x " +
                              std::to_string(s_.sequence) + " x " + std::to_string(s_.head_width) + ", " +
                              std::to_string(s_.kv_heads) + " heads of keys, causal");
        line.add("parameters", 0).add("tokens_per_step", s_.batch * s_.sequence).add("flop_per_step", flop());
        line.add("step_seconds", timed.seconds).add("communication_seconds", median(timed.blocked));
        line.add("bytes_counted", timed.counted).add("bytes_formula", bytes_by_formula());
        line.add("slowest_over_mean_pairs", timed.pairs_balance);
        return line.add("slowest_over_mean_seconds", median(timed.balance));
    }

    const RanksPtr ranks_;
    const Inputs whole_;
    std::vector<Timed> timed_;
};

}  // namespace

int main(int argc, char** argv) {
    return run_torch_lesson<Settings, Lesson>("sp_libtorch", argc, argv);
}
