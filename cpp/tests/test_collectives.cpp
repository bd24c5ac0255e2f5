// Our collectives against MPI's own, at uneven and tiny sizes, and the bytes they say they sent; the
// equality check that all ranks share.
#include <cmath>
#include <limits>
#include <vector>

#include "check.hpp"
#include "fived/lesson/equality.hpp"
#include "fived/mpi/collectives.hpp"
#include "fived/mpi/environment.hpp"

using namespace fived;

namespace {

/// Small whole numbers, so that sums are exact in any order.
template <class T>
std::vector<T> numbers(std::size_t n, int rank) {
    std::vector<T> values(n);
    for (std::size_t i = 0; i < n; ++i) values[i] = T((i * 7 + std::size_t(rank) * 13) % 32);
    return values;
}

template <class T>
void test_all_reduce(const Communicator& world, std::size_t n) {
    const std::size_t P = world.size(), r = world.rank();
    std::vector<T> expected = numbers<T>(n, world.rank());
    world.all_reduce(std::span(expected));

    std::vector<T> ring = numbers<T>(n, world.rank());
    const std::size_t bytes = ring_all_reduce(world, std::span(ring));
    CHECK(ring == expected);
    CHECK(bytes == ring_all_reduce_bytes(n, sizeof(T), world.size(), world.rank()));
    CHECK(world.all_reduce(std::uint64_t(bytes)) == 2 * (P - 1) * n * sizeof(T));

    std::vector<T> doubling = numbers<T>(n, world.rank());
    const std::size_t sent = recursive_doubling_all_reduce(world, std::span(doubling));
    CHECK(doubling == expected);
    const std::size_t rounds[] = {0, 0, 1, 1, 2}, extra = P == 3 && r != 1 ? 1 : 0;
    CHECK(sent == n * sizeof(T) * (P == 3 && r == 2 ? 1 : rounds[P] + extra));

    std::vector<T> scattered = numbers<T>(n, world.rank());
    const std::size_t scattering = ring_reduce_scatter(world, std::span(scattered));
    CHECK(scattering == ring_reduce_scatter_bytes(n, sizeof(T), world.size(), world.rank()));
    CHECK(std::ranges::equal(piece(std::span(scattered), P, r), piece(std::span(expected), P, r)));
    const std::size_t gathering = ring_all_gather(world, std::span(scattered));
    CHECK(gathering == ring_all_gather_bytes(n, sizeof(T), world.size(), world.rank()));
    CHECK(scattered == expected);
}

void test_broadcast(const Communicator& world) {
    for (int root = 0; root < world.size(); ++root) {
        std::vector<float> values = numbers<float>(1000, world.rank());
        const std::size_t bytes = tree_broadcast(world, std::span(values), root);
        CHECK(values == numbers<float>(1000, root));
        CHECK(world.all_reduce(std::uint64_t(bytes)) == (world.size() - 1) * 4000u);
    }
    std::vector<float> values(1);
    CHECK(contains(message_of([&] { tree_broadcast(world, std::span(values), 9); }), "no rank 9"));
}

/// Ranks that bring buffers of different lengths are told so, each with its own part of the truth.
void test_mismatch(const Communicator& world) {
    if (world.size() != 2) return;
    const Communicator pair = world.dup("mismatch");
    std::vector<double> values(world.rank() == 0 ? 10 : 8);
    const std::string message = message_of([&] { ring_all_reduce(pair, std::span(values)); });
    CHECK(contains(message, "MPI_Irecv on 'mismatch', rank " + std::to_string(world.rank()) + " of 2"));
    CHECK(contains(message, world.rank() == 0 ? "4 elements arrived from rank 1, 5 expected"
                                              : "elements arrived from rank 0, 4 expected"));
}

/// What is not a number on either side is an infinite difference, never none.
void test_equality(const Communicator& world) {
    const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
    const std::vector<Parameter> one{{"w", 0, 1, 3}};
    const std::vector<double> good{1, 2, 3};
    const auto apart = [&](const std::vector<double>& a, const std::vector<double>& b) {
        return largest_difference(world, std::span(one), std::span(a), std::span(b), 1e-12).value;
    };
    CHECK(apart(good, good) == 0 && std::abs(apart(good, {1, 2, 3.3}) - 0.1) < 1e-12);
    for (const std::vector<double>& bad : {std::vector{nan, 2.0, 3.0}, {nan, nan, nan}, {1.0, inf, 3.0}})
        CHECK(apart(bad, good) == inf && apart(good, bad) == inf && apart(bad, bad) == inf);
    CHECK(largest_difference(world, inf, inf).value == inf && largest_difference(world, nan, 1).value == inf);

    // A small tensor is measured by 4 eps / tolerance of the largest, with no jump; in units, by its own unit.
    const double share = share_of_largest<double>(1e-12);
    for (const double size : {1.0, 2 * share, share, share / 2, 1e-14, 0.0}) {
        const double expected = 1e-16 / std::max(size, share);
        const std::vector<Compared> two{{"large", 1, 0, 1}, {"small", size, 1e-16, 1e-18}};
        const Difference found = largest_difference(world, two, share);
        CHECK(std::abs(found.value / expected - 1) < 1e-12 && found.name == "small");
        const double units = size > 0 ? 1e-16 / std::max(1e-18, 0x1p-52 * size) : 0;
        CHECK(std::abs(largest_in_ulps(world, two, 0x1p-52).value - units) <= 1e-12 * units);
    }

    // A tensor that one side lacks stays infinite, whatever is compared after it; so does a difference from zeros.
    Difference lacking = largest_in_ulps(world, {{"absent", 0, inf}}, 0x1p-52);
    lacking.include({1, "later"});
    CHECK(lacking.value == inf && lacking.name == "absent");
    CHECK(largest_difference(world, {{"zero", 0, 1e-13}}, share).value == inf);
    CHECK(largest_difference(world, {{"zero", 0, 0}}, share).value == 0);
}

}  // namespace

int main(int argc, char** argv) {
    fived::Environment mpi(argc, argv);
    const Communicator world = Communicator::world();
    for (const std::size_t message : {std::size_t{4096}, ring_message}) {
        ring_message = message;  // many messages a step, then one
        for (const std::size_t n : {0, 1, 2, 3, 5, 64, 1001, 40000}) {
            test_all_reduce<float>(world, n);
            test_all_reduce<double>(world, n);
        }
    }
    test_broadcast(world);
    test_mismatch(world);
    test_equality(world);
    return world.all_reduce(failures) > 0;
}
