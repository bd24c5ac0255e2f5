// Collectives over several hosts, on one machine that is taken for several: every shape, against the formula.
#include <algorithm>
#include <vector>

#include "check.hpp"
#include "fived/mpi/environment.hpp"
#include "fived/mpi/hosts.hpp"
#include "numbers.hpp"

using namespace fived;

static std::size_t sent = 0;

/// Counts what goes to other ranks: MPI lets a program put itself before any of its calls.
extern "C" int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
                         MPI_Request* request) {
    int size = 0;
    MPI_Type_size(type, &size);
    sent += std::size_t(count) * size;
    return PMPI_Isend(data, count, type, to, tag, comm, request);
}

namespace {

void run(Hosts& hosts, const Stages& stages) {
    for (const auto& next : stages) {
        Stage stage = next();
        while (stage.rounds || !stage.messages.empty()) {
            if (stage.rounds && hosts.memory().advance(*stage.rounds, [](int, const Call&) { std::abort(); }))
                stage.rounds.reset();
            std::erase_if(stage.messages, [](Message& m) { return m.request.test(); });
            sched_yield();
        }
    }
}

void test_sizes(const Communicator& world, Hosts& hosts, std::size_t n) {
    const int P = world.size(), me = world.rank(), root = int(n % P);
    const Call call{.operation = 1, .type = 2, .elements = n};
    const std::size_t length = n * sizeof(std::int32_t);

    Numbers x = numbers(n, me);
    run(hosts, hosts.all_reduce(call, bytes(x), length, 4, sum));
    CHECK(x == total(world, n));

    x = numbers(n, me);
    run(hosts, hosts.all_reduce(call, bytes(x), length, 4, sum, root));
    CHECK(x == (me == root ? total(world, n) : numbers(n, me)));

    x = numbers(n, me);
    run(hosts, hosts.broadcast(call, bytes(x), length, root));
    CHECK(x == numbers(n, root));

    x = numbers(n, me);
    std::vector<Numbers> all(P, Numbers(n)), at_root = all;
    std::vector<std::byte*> places, root_places;
    for (Numbers& part : all) places.push_back(bytes(part));
    for (Numbers& part : at_root) root_places.push_back(bytes(part));
    run(hosts, hosts.all_gather(call, bytes(x), places, length));
    run(hosts, hosts.gather(call, bytes(x), root_places, length, root));
    for (int r = 0; r < P; ++r) CHECK(all[r] == numbers(n, r));
    for (int r = 0; r < P; ++r) CHECK(at_root[r] == (me == root ? numbers(n, r) : Numbers(n)));

    std::vector<Numbers> given;
    std::vector<const std::byte*> in;
    for (int r = 0; r < P; ++r) given.push_back(numbers(n, me, r));
    for (Numbers& part : given) in.push_back(bytes(part));
    run(hosts, hosts.reduce_scatter(call, in, bytes(x), length, 4, sum));
    CHECK(x == total(world, n, me));

    Inputs pieces;
    for (int r = 0; r < P; ++r) pieces.push_back(std::as_bytes(std::span(given[r])));
    if (me != root) pieces.assign(P, {});
    run(hosts, hosts.scatter(call, pieces, {bytes(x), length}, root));
    CHECK(x == numbers(n, root, me));

    // uneven: from rank a to rank b go n + a + 2 b numbers
    std::vector<Numbers> sent, received;
    for (int r = 0; r < P; ++r) {
        sent.push_back(numbers(n + me + 2 * r, me, r));
        received.emplace_back(n + r + 2 * me);
    }
    Inputs from;
    Outputs to;
    for (Numbers& part : sent) from.push_back(std::as_bytes(std::span(part)));
    for (Numbers& part : received) to.push_back(std::as_writable_bytes(std::span(part)));
    run(hosts, hosts.all_to_all(call, {from.begin(), from.end()}, {to.begin(), to.end()}));
    for (int r = 0; r < P; ++r) CHECK(received[r] == numbers(n + r + 2 * me, r, me));

    run(hosts, hosts.barrier(call));
}

/// Long messages to places that other ranks see, or that one rank does not show: the same numbers.
void test_places(const Communicator& world, Hosts& hosts) {
    const int P = world.size(), me = world.rank();
    const std::size_t n = 300'000, length = n * sizeof(std::int32_t);
    for (int hides = 0; hides <= P; ++hides) {  // P: none
        const auto block = me == hides ? nullptr : hosts.memory().block(P * length);
        CHECK(me == hides || block || hosts.memory().size() == 1 || !has_room_for_arenas());
        Numbers own(block ? 0 : P * n);
        std::byte* const place = block ? block.get() : bytes(own);
        std::vector<Numbers> given;
        StridedInputs from;
        StridedOutputs to;
        for (int r = 0; r < P; ++r) given.push_back(numbers(n, me, r));
        for (int r = 0; r < P; ++r) {
            from.emplace_back(std::as_bytes(std::span(given[r])));
            to.emplace_back(std::span(place + r * length, length));
        }
        run(hosts, hosts.all_to_all({}, from, to));
        const auto* const found = reinterpret_cast<const std::int32_t*>(place);
        for (int r = 0; r < P; ++r) {
            const Numbers expected = numbers(n, r, me);
            CHECK(std::equal(expected.begin(), expected.end(), found + r * n));
        }
        run(hosts, hosts.barrier({}));
        if (hosts.count() > 1) continue;  // MPI does not send from where it receives
        // what arrives takes the place of what was sent
        for (int r = 0; r < P; ++r) {
            std::ranges::copy(std::as_bytes(std::span(given[r])), place + r * length);
            from[r] = std::span<const std::byte>(place + r * length, length);
        }
        run(hosts, hosts.all_to_all({}, from, to));
        for (int r = 0; r < P; ++r) {
            const Numbers expected = numbers(n, r, me);
            CHECK(std::equal(expected.begin(), expected.end(), found + r * n));
        }
        run(hosts, hosts.barrier({}));
    }
}

/// What crosses between hosts is what the documentation says, to the byte.
void test_bytes(const Communicator& world, Hosts& hosts) {
    const std::size_t P = world.size(), H = hosts.count(), l = hosts.memory().size();
    if (H == 1 || P % H || P / H != l) return;
    const std::size_t n = 100 * P * P,
                      length = n * sizeof(std::int32_t);  // divisible by all that it is cut into
    Numbers x(n), whole(n * P);
    std::vector<const std::byte*> in;
    std::vector<std::byte*> out;
    for (std::size_t r = 0; r < P; ++r) in.push_back(bytes(whole) + r * length);
    for (std::size_t r = 0; r < P; ++r) out.push_back(bytes(whole) + r * length);
    const auto count = [&](const Stages& stages) {
        const std::size_t before = sent;
        run(hosts, stages);
        return sent - before;
    };
    const std::size_t agreeing = count(hosts.barrier({}));
    const bool at_root = hosts.host_of(world.rank())[0] == 0;
    CHECK(count(hosts.all_reduce({}, bytes(x), length, 4, sum)) == agreeing + 2 * (H - 1) * length / H / l);
    CHECK(count(hosts.all_reduce({}, bytes(x), length, 4, sum, 0)) == agreeing + (at_root ? 0 : length / l));
    CHECK(count(hosts.broadcast({}, bytes(x), length, 0)) == agreeing + (at_root ? (H - 1) * length / l : 0));
    CHECK(count(hosts.all_gather({}, bytes(x), out, length)) == agreeing + (H - 1) * length);
    CHECK(count(hosts.reduce_scatter({}, in, bytes(x), length, 4, sum)) == agreeing + (P - l) * length / l);
}

/// Every rank learns of the first that calls something else, wherever it is.
void test_mismatch(const Communicator& world, Hosts& hosts) {
    if (hosts.count() == 1) return;
    const int last = world.size() - 1;
    const Call call{.operation = 1, .elements = std::uint64_t(world.rank() == last ? 7 : 8)};
    try {
        run(hosts, hosts.barrier(call));
        CHECK(!"no mismatch found");
    } catch (const Differs& found) {
        CHECK(found.rank == (world.rank() == last ? 0 : last));
        CHECK(found.theirs.elements == (world.rank() == last ? 8u : 7u));
    }
}

}  // namespace

int main(int argc, char** argv) {
    fived::Environment mpi(argc, argv);
    const Communicator world = Communicator::world();
    const std::size_t chunk = HostMemory::slot_bytes / sizeof(std::int32_t);
    for (const int per_host : {1, 2, 3, 4})
        for (const std::size_t largest : {std::size_t(1000), max_message}) {
            Hosts hosts(world, world.rank() / per_host, largest);
            CHECK(hosts.count() == (world.size() + per_host - 1) / per_host);
            for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{2}, std::size_t{1025},
                                        chunk - 1, chunk + 1, 3 * chunk + 5})
                test_sizes(world, hosts, n);
            if (largest == max_message) test_places(world, hosts);
            test_bytes(world, hosts);
            test_mismatch(world, hosts);
        }
    return world.all_reduce(failures) > 0;
}
