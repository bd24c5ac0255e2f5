// Communicators, requests, and what their errors say.
#include <vector>

#include "check.hpp"
#include "fived/mpi/environment.hpp"
#include "fived/mpi/mpi.hpp"

using namespace fived;

namespace {

void test_cut() {
    for (const std::size_t n : {0, 1, 7, 64, 1000003})
        for (const std::size_t pieces : {1, 2, 3, 7}) {
            CHECK(cut(n, pieces, 0) == 0 && cut(n, pieces, pieces) == n);
            for (std::size_t i = 0; i < pieces; ++i) CHECK(cut(n, pieces, i) == n * i / pieces);
        }
    CHECK(cut(std::size_t{1} << 62, 3, 3) == std::size_t{1} << 62);  // no overflow on the way
}

/// Piece r of each rank is r, the rest must come from the others.
void test_all_gather(const Communicator& world, std::size_t n) {
    std::vector<double> gathered(n, -1.0), expected(n);
    std::ranges::fill(piece(std::span(gathered), world.size(), world.rank()), world.rank());
    for (int r = 0; r < world.size(); ++r) std::ranges::fill(piece(std::span(expected), world.size(), r), r);
    world.all_gather(std::span(gathered));
    CHECK(gathered == expected);
}

/// Rank r sends (r + 2q) % 3 times 100 r + q to rank q, and keeps the rest of its buffer.
void test_all_to_all(const Communicator& world) {
    const auto count = [](int from, int to) { return std::size_t(from + 2 * to) % 3; };
    const int P = world.size(), r = world.rank();
    std::vector<Range> to, from;
    std::vector<int> data, expected{-1}, got;
    for (int q = 0; q < P; ++q) {
        to.push_back({data.size(), count(r, q)}), from.push_back({expected.size(), count(q, r)});
        data.insert(data.end(), count(r, q), 100 * r + q);
        expected.insert(expected.end(), count(q, r), 100 * q + r);
    }
    got.assign(expected.size(), -1);
    world.all_to_all(std::span<const int>(data), to, std::span(got), from);
    CHECK(got == expected);
    to[0].length = data.size() + 1;
    const auto again = [&] { world.all_to_all(std::span<const int>(data), to, std::span(got), from); };
    CHECK(contains(message_of(again), "a piece ends at element " + std::to_string(data.size() + 1) + " of " +
                                          std::to_string(data.size())));
    to.resize(P + 1);
    CHECK(contains(message_of(again), std::to_string(P + 1) + " pieces for " + std::to_string(P) + " ranks"));
}

void test_messages_in_pieces(const Communicator& world) {
    const std::size_t usual = max_message;
    max_message = 3;  // as if 3 elements were 2^31
    const int P = world.size(), next = (world.rank() + 1) % P, previous = (world.rank() + P - 1) % P;
    for (const std::size_t n : {0, 1, 3, 10}) {
        std::vector<double> values(n, world.rank()), sum(n, 1.0), got(n, -1.0);
        if (P == 2) {
            world.exchange(std::span(values), std::span(got), next);
            CHECK(got == std::vector<double>(n, previous));
        }
        world.all_reduce(std::span(sum));
        CHECK(sum == std::vector<double>(n, P));
        std::vector<int> shared(n, world.rank() == P - 1 ? 5 : 0);
        world.broadcast(std::span(shared), P - 1);
        CHECK(shared == std::vector<int>(n, 5));
        test_all_gather(world, n);
        if (world.rank() == 0 && P > 1) world.send(std::span(values), 1);
        if (world.rank() == 1) world.receive(std::span(got), 0);
        if (world.rank() == 1) CHECK(got == std::vector<double>(n, 0));
    }
    std::vector<float> long_buffer(4);
    const std::string message = message_of([&] { (void)world.start_all_reduce(std::span(long_buffer)); });
    CHECK(contains(message, "MPI_Iallreduce") && contains(message, "4 elements") &&
          contains(message, "at most 3"));
    max_message = usual;
}

void test_split_and_dup(const Communicator& world) {
    const Communicator half = world.split(world.rank() % 2, -world.rank(), "half");
    CHECK(half.name() == "half");
    CHECK(half.size() == (world.size() + 1 - world.rank() % 2) / 2);
    CHECK(half.all_reduce(world.rank() % 2, MPI_MAX) == world.rank() % 2);
    CHECK(half.rank() == half.size() - 1 - world.rank() / 2);
    const Communicator copy = world.dup("copy");
    CHECK(copy.rank() == world.rank() && copy.handle() != world.handle() && copy.name() == "copy");
    CHECK(contains(message_of([&] { world.split(-3, 0, "none"); }), "color -3"));
}

void test_requests(const Communicator& world) {
    std::vector<float> a(100, 1.0f), b(7, float(world.rank()));
    Request first = world.start_all_reduce(std::span(a)), second = world.start_all_reduce(std::span(b));
    while (!first.test()) {
    }
    Request moved = std::move(second);
    moved.wait();
    CHECK(!first.pending() && !moved.pending() && moved.test());
    CHECK(a[99] == float(world.size()) && b[6] == float(world.size() * (world.size() - 1) / 2));
    for (int root = 0; root < world.size(); ++root) {
        std::vector<double> terms(5, 1.0);
        world.start_reduce(std::span(terms), root).wait();
        CHECK(terms == std::vector<double>(5, world.rank() == root ? world.size() : 1));
    }
}

/// Every message names the call, the communicator and the rank.
void test_errors(const Communicator& world) {
    const std::string here =
        "'pair', rank " + std::to_string(world.rank()) + " of " + std::to_string(world.size());
    const Communicator pair = world.dup("pair");
    std::vector<int> three(3), five(5);
    const std::string nobody = message_of([&] { pair.send(std::span(three), world.size()); });
    CHECK(contains(nobody, "MPI_Send on " + here) &&
          contains(nobody, "no rank " + std::to_string(world.size())));
    CHECK(contains(message_of([&] { pair.broadcast(std::span(three), -1); }), "MPI_Bcast on " + here));
    CHECK(contains(message_of([&] { (void)pair.start_reduce(std::span(three), -1); }),
                   "MPI_Ireduce on " + here));
    CHECK(contains(message_of([&] { pair.exchange(std::span(three), std::span(five), 0); }),
                   "3 elements to send, room for 5"));
    CHECK(contains(message_of([&] { pair.check(MPI_ERR_COUNT, "MPI_Isend"); }), "MPI_Isend on " + here));
    if (world.rank() == 0 && world.size() > 1) {
        pair.send(std::span(three), 1);
        pair.send(std::span(five), 1);
    }
    if (world.rank() == 1) {
        const std::string few = message_of([&] { pair.receive(std::span(five), 0); });
        CHECK(contains(few, "MPI_Recv on " + here) &&
              contains(few, "3 elements arrived from rank 0, 5 expected"));
        const std::string many = message_of([&] { pair.receive(std::span(three), 0); });
        CHECK(contains(many, "MPI_Recv on " + here) &&
              contains(many, "elements arrived from rank 0, 3 expected"));
    }
}

}  // namespace

int main(int argc, char** argv) {
    fived::Environment mpi(argc, argv);
    const Communicator world = Communicator::world();
    test_cut();
    test_messages_in_pieces(world);
    for (const std::size_t n : {0, 1, 2, 3, 5, 64, 40001}) test_all_gather(world, n);
    test_all_to_all(world);
    test_split_and_dup(world);
    test_requests(world);
    test_errors(world);
    return world.all_reduce(failures) > 0;
}
