// mpirun -np 4 sp_mpi                ring attention in both orders against plain attention on one rank
// mpirun -np 2 sp_mpi --benchmark    8192 tokens, 8 heads of 64, float32: time and balance of the two orders
#include <array>
#include <cstdio>
#include <string>
#include <vector>

#include "fived/lesson/equality.hpp"
#include "fived/lesson/lesson.hpp"
#include "fived/math/random.hpp"
#include "sp_mpi.hpp"

namespace {

using namespace fived;

struct Settings : LessonSettings {
    AttentionShape shape{.batch = 2, .heads = 4, .kv_heads = 2, .sequence = 203, .head_width = 16};

    /// What --benchmark starts from.
    void prefer_benchmark() {
        shape = {.batch = 1, .heads = 8, .kv_heads = 8, .sequence = 8192, .head_width = 64};
        dtype = Dtype::float32;
    }
    Options options() {
        Options options("Ring attention by MPI: the sequence is split over the ranks. Run it under mpirun.");
        const std::size_t one = 1;
        options.add("batch", shape.batch, one, "samples");
        options.add("heads", shape.heads, one, "of the queries");
        options.add("kv-heads", shape.kv_heads, one, "heads of the keys and values; divides --heads");
        options.add("sequence", shape.sequence, one, "positions of all ranks together");
        options.add("head-width", shape.head_width, one, "of one head");
        add_to(options, "rounds that are timed", "of the numbers", " of each order",
               "time, compare nothing; with --help: its own defaults");
        return options;
    }
    void check(int) const {
        const std::size_t H = shape.heads, G = shape.kv_heads;
        if (H % G == 0) return;
        std::string divisors;
        for (std::size_t g = 1; g <= H; ++g)
            if (H % g == 0) divisors += (g == 1 ? "" : ", ") + std::to_string(g);
        throw UsageError("--kv-heads " + std::to_string(G) + " does not divide --heads " + std::to_string(H) +
                         "; give one of " + divisors);
    }
};

/// q, k, v and the gradient of the result at some positions, and what attention makes of them.
template <class T>
struct Arrays {
    std::vector<T> q, k, v, dout, out, logsumexp, dq, dk, dv;

    /// A number depends on the seed and its place in the whole sequence alone: all ranks cut the same arrays.
    Arrays(const AttentionShape& shape, const std::vector<Chunk>& chunks, std::uint64_t seed) {
        const auto& [B, H, G, S, K] = shape;
        const std::size_t of_queries = B * H * length(chunks) * K, of_keys = B * G * length(chunks) * K;
        for (auto* array : {&q, &dout, &out, &dq}) array->resize(of_queries);
        for (auto* array : {&k, &v, &dk, &dv}) array->resize(of_keys);
        logsumexp.resize(B * H * length(chunks));
        std::uint64_t stream = 0;
        for (const auto& [array, heads] : {std::pair(&q, H), {&k, G}, {&v, G}, {&dout, H}}) {
            T* next = array->data();
            for (std::size_t head = 0; head < B * heads; ++head)
                for (const Chunk& chunk : chunks)
                    for (std::size_t i = 0; i < chunk.length * K; ++i)
                        *next++ = T(normal(seed, stream, (head * S + chunk.begin) * K + i));
            ++stream;
        }
    }
};

/// Attention as it is written down: one query after the other, all in float64.
template <class T>
void plain_attention(const AttentionShape& shape, bool causal, Arrays<T>& a) {
    const auto& [B, H, G, S, K] = shape;
    const double scale = 1 / std::sqrt(double(K));
    std::vector<double> p(S), dp(S), dk(a.k.size()), dv(a.v.size());
    for (std::size_t row = 0; row < B * H * S; ++row) {
        const std::size_t i = row % S, first = row / S / (H / G) * S, seen = causal ? i + 1 : S;
        const auto dot = [&](const T* x, const T* y) {
            double sum = 0;
            for (std::size_t c = 0; c < K; ++c) sum += double(x[c]) * double(y[c]);
            return sum;
        };
        const T *q = &a.q[row * K], *dout = &a.dout[row * K];
        double largest = -std::numeric_limits<double>::infinity(), sum = 0, delta = 0;
        for (std::size_t j = 0; j < seen; ++j) {
            p[j] = scale * dot(q, &a.k[(first + j) * K]);
            dp[j] = dot(dout, &a.v[(first + j) * K]);
            largest = std::max(largest, p[j]);
        }
        for (std::size_t j = 0; j < seen; ++j) sum += p[j] = std::exp(p[j] - largest);
        for (std::size_t j = 0; j < seen; ++j) delta += (p[j] /= sum) * dp[j];
        a.logsumexp[row] = T(largest + std::log(sum));
        for (std::size_t c = 0; c < K; ++c) {
            double out = 0, dq = 0;
            for (std::size_t j = 0; j < seen; ++j) {
                const std::size_t at = (first + j) * K + c;
                const double ds = p[j] * (dp[j] - delta) * scale;
                out += p[j] * double(a.v[at]), dq += ds * double(a.k[at]);
                dv[at] += p[j] * double(dout[c]), dk[at] += ds * double(q[c]);
            }
            a.out[row * K + c] = T(out), a.dq[row * K + c] = T(dq);
        }
    }
    std::ranges::transform(dk, a.dk.begin(), [](double x) { return T(x); });
    std::ranges::transform(dv, a.dv.begin(), [](double x) { return T(x); });
}

template <class T>
class Lesson : LessonBase<Settings> {
  public:
    Lesson(const Communicator& world, const Settings& settings)
        : LessonBase(world, settings), shape_(settings.shape) {}

    bool run() {
        say("sp_mpi: attention, batch %zu, %zu heads and %zu of keys, width %zu, sequence %zu, %s, %d "
            "rank(s)\n",
            shape_.batch, shape_.heads, shape_.kv_heads, shape_.head_width, shape_.sequence,
            name_of(s_.dtype), world_.size());
        bool right = s_.benchmark || prove();
        right &= measure();
        if (!s_.benchmark)
            say(right ? "\nproved: attention and its gradients on %d rank(s) equal those on one, bytes "
                        "counted = formula.\n"
                      : "\nWRONG: attention or its gradients on %d rank(s) differ from those on one, or "
                        "bytes counted from the formula.\n",
                world_.size());
        for (const Timed& timed : timed_) append(record_of(timed));
        return right;
    }

  private:
    struct Timed {
        Order order;
        std::size_t counted = 0, formula = 0;
        double pairs_balance = 0;
        std::vector<double> seconds{}, blocked{}, balance{};
    };

    std::vector<Chunk> my_chunks(Order order) const {
        return chunks(shape_.sequence, world_.size(), world_.rank(), order);
    }

    /// Both orders, with the causal mask and without, against plain attention on the whole sequence.
    bool prove() {
        say("\nlargest relative difference from one device, and bytes that all ranks sent\n"
            "%-24s %8s %8s %8s %8s %8s  %10s %10s  %10s %10s\n",
            "", "out", "logsum", "dq", "dk", "dv", "forward", "by formula", "backward", "by formula");
        bool right = true;
        for (const bool causal : {true, false}) {
            const std::vector<Chunk> whole{{0, shape_.sequence}};
            Arrays<T> expected(shape_, whole, s_.seed);
            plain_attention(shape_, causal, expected);
            for (const Order order : values_of<Order>()) right &= compare(expected, order, causal);
        }
        return right;
    }

    bool compare(const Arrays<T>& expected, Order order, bool causal) {
        const std::string name = name_of(order);
        RingAttention<T> ring(&world_, shape_, order, causal);
        Arrays<T> a(shape_, my_chunks(order), s_.seed);
        ring.forward(a.q, a.k, a.v, a.out, a.logsumexp);
        std::array<std::uint64_t, 4> bytes{ring.bytes_sent(), ring.forward_bytes()};
        ring.backward(a.dout, a.q, a.k, a.v, a.out, a.logsumexp, a.dq, a.dk, a.dv);
        bytes[2] = ring.bytes_sent(), bytes[3] = ring.backward_bytes();
        const std::size_t H = shape_.heads, G = shape_.kv_heads, K = shape_.head_width;
        const std::array<double, 5> apart{difference(expected.out, a.out, H, K, order),
                                          difference(expected.logsumexp, a.logsumexp, H, 1, order),
                                          difference(expected.dq, a.dq, H, K, order),
                                          difference(expected.dk, a.dk, G, K, order),
                                          difference(expected.dv, a.dv, G, K, order)};
        const bool counted = everywhere(bytes[0] == bytes[1] && bytes[2] == bytes[3]);
        world_.all_reduce(std::span<std::uint64_t>(bytes));
        say("%-24s %8.1e %8.1e %8.1e %8.1e %8.1e  %10zu %10zu  %10zu %10zu\n",
            (name + (causal ? ", causal" : ", all pairs")).c_str(), apart[0], apart[1], apart[2], apart[3],
            apart[4], std::size_t(bytes[0]), std::size_t(bytes[1]), std::size_t(bytes[2]),
            std::size_t(bytes[3]));
        return within(name, "", tolerance(), {*std::ranges::max_element(apart)}) && counted;
    }

    /// Of this rank's positions of x, [B heads, S, width], the largest of all ranks. Collective.
    double difference(const std::vector<T>& x, const std::vector<T>& y, std::size_t heads, std::size_t width,
                      Order order) const {
        std::vector<Compared> one(1);
        const T* mine = y.data();
        for (std::size_t head = 0; head < shape_.batch * heads; ++head)
            for (const Chunk& chunk : my_chunks(order))
                for (std::size_t i = 0; i < chunk.length * width; ++i, ++mine)
                    one[0].include(double(x[(head * shape_.sequence + chunk.begin) * width + i]),
                                   double(*mine));
        return largest_difference(world_, one, share_of_largest<T>(tolerance())).value;
    }

    /// Forward and backward, causal, in both orders and on rank 0 alone, in turn.
    bool measure() {
        std::vector<RingAttention<T>> rings;
        std::vector<Arrays<T>> arrays;
        RingAttention<T> alone(nullptr, shape_, Order::contiguous, true);
        Arrays<T> whole(shape_, {{0, world_.rank() == 0 ? shape_.sequence : 0}}, s_.seed);
        bool right = true;
        const std::vector<Order> orders = values_of<Order>();
        rings.reserve(orders.size());
        for (const Order order : orders) {
            rings.emplace_back(&world_, shape_, order, true);
            arrays.emplace_back(shape_, my_chunks(order), s_.seed);
            timed_.push_back({order});
            timed_.back().pairs_balance = balance(double(my_pairs(order)));
        }
        std::vector<double> one_rank;
        for (int round = -1; round < s_.steps; ++round) {
            world_.barrier();
            const Timer timer;
            if (world_.rank() == 0) step(alone, whole, nullptr);
            const double seconds = world_.all_reduce(timer.seconds(), MPI_MAX);
            if (round >= 0) one_rank.push_back(seconds);
            for (std::size_t i = 0; i < orders.size(); ++i)
                right &= time_round(rings[i], arrays[i], timed_[i], round);
        }
        show(one_rank);
        return right;
    }

    bool time_round(RingAttention<T>& ring, Arrays<T>& a, Timed& timed, int round) {
        world_.barrier();
        const Timer timer;
        const double blocked = step(ring, a, &timed);
        const double mine = timer.seconds();
        const double seconds = world_.all_reduce(mine, MPI_MAX), waited = world_.all_reduce(blocked, MPI_MAX);
        const double apart = balance(mine - blocked);
        if (round >= 0)
            timed.seconds.push_back(seconds), timed.blocked.push_back(waited), timed.balance.push_back(apart);
        return everywhere(timed.counted == timed.formula);
    }
    /// Returns the seconds in which this rank waited for messages.
    static double step(RingAttention<T>& ring, Arrays<T>& a, Timed* timed) {
        ring.forward(a.q, a.k, a.v, a.out, a.logsumexp);
        std::size_t sent = ring.bytes_sent();
        const double blocked = ring.blocked_seconds();
        ring.backward(a.dout, a.q, a.k, a.v, a.out, a.logsumexp, a.dq, a.dk, a.dv);
        sent += ring.bytes_sent();
        if (timed) timed->counted = sent, timed->formula = ring.forward_bytes() + ring.backward_bytes();
        return blocked + ring.blocked_seconds();
    }

    /// The slowest rank's share over the mean.
    double balance(double mine) const {
        return world_.all_reduce(mine, MPI_MAX) * world_.size() / world_.all_reduce(mine);
    }
    std::size_t my_pairs(Order order) const {
        return pairs(shape_.sequence, world_.size(), world_.rank(), order, true);
    }
    /// Two products of all pairs forward and five backward, 2 K operations a pair in each.
    double flop() const {
        return 14.0 * double(shape_.head_width * shape_.batch * shape_.heads) *
               double(pairs(shape_.sequence, 1, 0, Order::contiguous, true));
    }

    void show(const std::vector<double>& one_rank) const {
        say("\nforward and backward, causal, %d rounds in turn; one rank alone %.1f ms, %.1f GFLOP/s\n"
            "%-12s %12s %12s  %9s %9s %9s %9s   %s\n",
            s_.steps, median(one_rank) * 1e3, flop() / median(one_rank) / 1e9, "", "bytes sent", "formula",
            "ms", "blocked", "GFLOP/s", "speed-up", "slowest rank / mean: pairs, seconds");
        for (const Timed& timed : timed_)
            say("%-12s %12zu %s %-12zu %7.1f %9.1f %9.1f %9.2f   %.3f, %.3f\n", name_of(timed.order),
                timed.counted, timed.counted == timed.formula ? "=" : "!=", timed.formula,
                median(timed.seconds) * 1e3, median(timed.blocked) * 1e3,
                flop() / median(timed.seconds) / 1e9, ratio(one_rank, timed.seconds), timed.pairs_balance,
                median(timed.balance));
    }

    Record record_of(const Timed& timed) const {
        const auto& [B, H, G, S, K] = shape_;
        Record line = record("sp", std::string("sp_mpi-") + name_of(timed.order), name_of(timed.order));
        line.add("model", "attention " + std::to_string(B) + " x " + std::to_string(H) + " x " +
                              std::to_string(S) + " x " + std::to_string(K) + ", " + std::to_string(G) +
                              " heads of keys, causal");
        line.add("parameters", 0).add("tokens_per_step", B * S).add("flop_per_step", flop());
        line.add("step_seconds", timed.seconds).add("communication_seconds", median(timed.blocked));
        line.add("bytes_counted", timed.counted).add("bytes_formula", timed.formula);
        line.add("slowest_over_mean_pairs", timed.pairs_balance);
        return line.add("slowest_over_mean_seconds", median(timed.balance));
    }

    const AttentionShape shape_;
    std::vector<Timed> timed_;
};

}  // namespace

int main(int argc, char** argv) {
    return run_mpi_lesson<Settings, Lesson>("sp_mpi", argc, argv);
}
