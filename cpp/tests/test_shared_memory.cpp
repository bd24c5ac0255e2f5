// Collectives through the memory of one host, at sizes around the borders of their chunks, and calls that differ.
#include <algorithm>
#include <array>
#include <vector>

#include "check.hpp"
#include "fived/mpi/environment.hpp"
#include "fived/mpi/shared_memory.hpp"
#include "numbers.hpp"

using namespace fived;

namespace {

std::string run(HostMemory& memory, Rounds rounds) {
    std::string differs;
    const auto mismatch = [&](int rank, const Call& theirs) {
        differs += std::to_string(rank) + ":" + std::to_string(theirs.elements) + " ";
    };
    while (differs.empty() && !memory.advance(rounds, mismatch)) sched_yield();
    return differs;
}

void test_sizes(const Communicator& world, HostMemory& memory, std::size_t n) {
    const int P = world.size(), me = world.rank(), root = int(n % P);
    const Call call{.operation = 1, .type = 2, .elements = n};
    const std::size_t length = n * sizeof(std::int32_t);

    Numbers x = numbers(n, me);
    CHECK(run(memory, all_reduce(memory, call, bytes(x), length, 4, sum)).empty());
    CHECK(x == total(world, n));

    x = numbers(n, me);
    run(memory, all_reduce(memory, call, bytes(x), length, 4, sum, root));
    CHECK(x == (me == root ? total(world, n) : numbers(n, me)));

    x = numbers(n, me);
    run(memory, broadcast(memory, call, bytes(x), length, root));
    CHECK(x == numbers(n, root));

    x = numbers(n, me);
    std::vector<Numbers> all(P, Numbers(n));
    std::vector<std::byte*> places;
    for (Numbers& part : all) places.push_back(bytes(part));
    run(memory, all_gather(memory, call, bytes(x), places, length));
    for (int r = 0; r < P; ++r) CHECK(all[r] == numbers(n, r));

    std::vector<Numbers> given;
    std::vector<const std::byte*> in;
    for (int r = 0; r < P; ++r) given.push_back(numbers(n, me, r));
    for (Numbers& part : given) in.push_back(bytes(part));
    run(memory, reduce_scatter(memory, call, in, bytes(x), length, 4, sum));
    CHECK(x == total(world, n, me));

    // uneven: from rank a to rank b go n + a + 2 b numbers
    std::vector<Numbers> sent, received;
    for (int r = 0; r < P; ++r) {
        sent.push_back(numbers(n + me + 2 * r, me, r));
        received.emplace_back(n + r + 2 * me);
    }
    std::vector<std::span<const std::byte>> from;
    std::vector<std::span<std::byte>> to;
    for (Numbers& part : sent) from.push_back(std::as_bytes(std::span(part)));
    for (Numbers& part : received) to.push_back(std::as_writable_bytes(std::span(part)));
    run(memory,
        all_to_all(memory, call, {from.begin(), from.end()}, {to.begin(), to.end()}, 4 * (n + 3 * (P - 1))));
    for (int r = 0; r < P; ++r) CHECK(received[r] == numbers(n + r + 2 * me, r, me));

    run(memory, barrier(call));
}

/// Memory for `numbers` numbers: a block that the other ranks see, or memory of this rank's own.
struct Room {
    Room(HostMemory& memory, std::size_t numbers, bool seen) : own(seen ? 0 : numbers), size(numbers) {
        if (seen && numbers) block = memory.block(numbers * sizeof(std::int32_t));
        CHECK(!seen || numbers == 0 || block || memory.size() == 1 || !has_room_for_arenas());
        if (!block) own.resize(numbers);
    }
    std::int32_t* data() { return block ? reinterpret_cast<std::int32_t*>(block.get()) : own.data(); }
    std::int32_t operator[](std::size_t i) { return data()[i]; }
    Numbers own;
    std::size_t size;
    std::shared_ptr<std::byte> block;
};

/// An all-to-all by way of the slots, or straight to places in blocks.
void exchange(HostMemory& memory, const Call& call, std::vector<Strided<const std::byte>> in,
              std::vector<Strided<std::byte>> out, std::size_t longest, bool straight) {
    if (!straight || memory.size() == 1 || !has_room_for_arenas())
        return void(run(memory, all_to_all(memory, call, in, out, longest)));
    const int P = memory.size(), me = memory.rank();
    std::vector<Destination> mine, all(P * P);
    std::vector<std::byte*> rows;
    for (int r = 0; r < P; ++r) {
        mine.push_back(memory.describe(out[r]));
        CHECK(!mine.back().elsewhere);
        rows.push_back(reinterpret_cast<std::byte*>(&all[P * r]));
    }
    run(memory, all_gather(memory, call, reinterpret_cast<const std::byte*>(mine.data()), rows,
                           P * sizeof(Destination)));
    for (int r = 0; r < P; ++r) out[r] = memory.place_of(all[P * r + me]);
    run(memory, all_to_all_into_arenas(memory, call, in, out, longest));
}

/// Columns of a matrix of n rows go to each rank, which stores them below each other in groups of 3 columns.
void test_gaps(const Communicator& world, HostMemory& memory, std::size_t n, bool straight) {
    const std::size_t P = world.size(), me = world.rank(), item = sizeof(std::int32_t);
    const std::size_t groups = 2, wide = 3, columns = P * groups * wide + 1;
    using In = Strided<const std::byte>;
    using Out = Strided<std::byte>;
    Numbers x = numbers(n * columns, int(me));
    Room y(memory, P * groups * n * wide, straight);
    std::vector<In> in;
    std::vector<Out> out;
    for (std::size_t r = 0; r < P; ++r) {
        in.emplace_back(bytes(x) + (1 + r * groups * wide) * item, groups * wide * item,
                        std::vector<In::Dim>{{n, std::ptrdiff_t(columns * item)}});
        out.emplace_back(reinterpret_cast<std::byte*>(y.data()) + r * n * wide * item, wide * item,
                         std::vector<Out::Dim>{{n, std::ptrdiff_t(wide * item)},
                                               {groups, std::ptrdiff_t(P * n * wide * item)}});
    }
    const Call call{.operation = 3, .elements = n};
    exchange(memory, call, in, out, n * groups * wide * item, straight);
    for (std::size_t r = 0; r < P; ++r) {
        const Numbers given = numbers(n * columns, int(r));
        for (std::size_t row = 0; row < n; ++row)
            for (std::size_t c = 0; c < groups * wide; ++c)
                CHECK(y[((c / wide * P + r) * n + row) * wide + c % wide] ==
                      given[row * columns + 1 + me * groups * wide + c]);
    }
}

/// Every rank sends some columns of its matrix to each rank, column by column in bands of `tall` rows.
void test_columns(const Communicator& world, HostMemory& memory, std::size_t tall, bool straight) {
    const std::size_t P = world.size(), me = world.rank(), item = sizeof(std::int32_t);
    const std::size_t bands = 3, wide = 700, width = P * wide + 5;
    using In = Strided<const std::byte>;
    using Out = Strided<std::byte>;
    Numbers x = numbers(bands * tall * width, int(me));
    Room y(memory, P * bands * wide * tall, straight);
    const std::size_t bytes_each = bands * wide * tall * item;
    std::vector<In> in;
    std::vector<Out> out;
    for (std::size_t r = 0; r < P; ++r) {
        in.emplace_back(bytes(x) + r * wide * item, item,
                        std::vector<In::Dim>{{bands, std::ptrdiff_t(tall * width * item)},
                                             {wide, std::ptrdiff_t(item)},
                                             {tall, std::ptrdiff_t(width * item)}});
        out.emplace_back(std::span(reinterpret_cast<std::byte*>(y.data()) + r * bytes_each, bytes_each));
        CHECK(in.back().crosswise() == (tall == 16 || tall == 256));
    }
    const Call call{.operation = 3, .elements = tall};
    exchange(memory, call, in, out, bytes_each, straight);
    for (std::size_t r = 0, i = 0; r < P; ++r) {
        const Numbers given = numbers(bands * tall * width, int(r));
        std::size_t wrong = 0;
        for (std::size_t band = 0; band < bands; ++band)
            for (std::size_t c = 0; c < wide; ++c)
                for (std::size_t t = 0; t < tall; ++t)
                    wrong += y[i++] != given[(band * tall + t) * width + me * wide + c];
        CHECK(wrong == 0);
    }
}

/// Blocks of columns of numbers of `run` bytes are what the runs are one by one, wherever they begin.
void test_blocks(std::size_t run) {
    const Numbers x = numbers(60'000, 1);
    const std::size_t tall = 128 / run, apart = 40 * run;
    const Strided<const std::byte> piece(
        reinterpret_cast<const std::byte*>(x.data()) + 2 * run, run,
        {{3, std::ptrdiff_t(tall * apart)}, {7, std::ptrdiff_t(run)}, {tall, std::ptrdiff_t(apart)}});
    CHECK(piece.crosswise());
    for (std::size_t begin = 0; begin <= piece.size(); begin += 7)
        for (std::size_t count = 0; begin + count <= piece.size(); count += 13) {
            std::vector<std::byte> found(count), expected(count);
            piece.gather(begin, count, found.data(), copy_through_cache);
            piece.each(begin, count, [&](const std::byte* from, std::size_t at, std::size_t n) {
                std::copy_n(from, n, &expected[at]);
            });
            CHECK(found == expected);
        }
}

/// Runs from any byte of the message to any other.
void test_runs() {
    const Numbers x = numbers(60, 1);
    const auto* const start = reinterpret_cast<const std::byte*>(x.data());
    const Strided<const std::byte> piece(start + 5, 3, {{4, 50}, {2, -4}});
    std::vector<std::byte> message;
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j)
            for (int k = 0; k < 3; ++k) message.push_back(start[5 + 50 * i - 4 * j + k]);
    CHECK(piece.size() == 24);
    for (std::size_t begin = 0; begin <= 24; ++begin)
        for (std::size_t count = 0; begin + count <= 24; ++count) {
            std::vector<std::byte> found(count);
            piece.each(begin, count, [&](const std::byte* from, std::size_t at, std::size_t n) {
                std::copy_n(from, n, &found[at]);
            });
            CHECK(std::equal(found.begin(), found.end(), message.begin() + std::ptrdiff_t(begin)));
        }
    try {
        (void)piece.whole();
        CHECK(false);
    } catch (const std::logic_error&) {
    }
}

void test_mismatch(const Communicator& world) {
    HostMemory memory(world);
    Numbers x = numbers(8, world.rank());
    const Call call{.operation = 1, .type = 2, .elements = std::uint64_t(world.rank() == 0 ? 8 : 7)};
    std::string expected;
    for (int r = 0; r < world.size(); ++r)
        if ((r == 0) != (world.rank() == 0)) expected += std::to_string(r) + (r == 0 ? ":8 " : ":7 ");
    CHECK(run(memory, all_reduce(memory, call, bytes(x), 4 * call.elements, 4, sum)) == expected);
}

/// Blocks do not overlap, are used again, and outlive the memory that they came from.
void test_arena(const Communicator& world) {
    const std::size_t large = 3 << 20;
    std::shared_ptr<std::byte> last;
    if (world.size() == 1 || !has_room_for_arenas()) return;
    {
        HostMemory memory(world);
        auto a = memory.block(large), none = memory.block(0), b = memory.block(1), c = memory.block(large);
        CHECK(none && none != b);
        std::byte* const first = a.get();
        CHECK(b.get() >= a.get() + large && c.get() > b.get());
        CHECK(!memory.describe({a.get(), 8, {{3, 100}}}).elsewhere);
        CHECK(memory.describe({a.get(), 8, {{2, 8}, {2, 16}, {2, 32}, {2, 64}}})
                  .elsewhere);  // too many dimensions
        CHECK(memory.describe({reinterpret_cast<std::byte*>(&memory), 8, {}}).elsewhere);
        CHECK(!memory.block(std::size_t(1) << 50));
        b.reset(), none.reset(), a.reset();  // one behind the other: they serve what is larger than each
        a = memory.block(large + 1);
        CHECK(a.get() == first);
        a.reset(), c.reset();
        last = memory.block(2 * large + 1);
        CHECK(last.get() == first);
        std::fill_n(last.get(), 2 * large, std::byte(world.rank()));
    }
    CHECK(last.get()[2 * large - 1] == std::byte(world.rank()));
}

/// The kernels that another processor would use, up and down: sources are at any distance from their places, modulo a page.
void test_lines() {
#ifdef __SSE2__
    const Numbers from = numbers(3 * 1024, 1);
    std::vector<std::byte> room(8 * 256 + 64);
    std::byte* const first = room.data() + (-reinterpret_cast<std::uintptr_t>(room.data()) & 63);
    std::byte* to[8];
    const std::byte* sources[8];
    for (int r = 0; r < 8; ++r) to[r] = first + 256 * r;
    const auto check = [&](CopyLines* copy, int runs) {
        std::fill(room.begin(), room.end(), std::byte(0));
        for (int r = 0; r < 8; r += runs) copy(to + r, sources + r, 256);
        arrive();
        for (int r = 0; r < 8; ++r) CHECK(std::equal(to[r], to[r] + 256, sources[r]));
    };
    for (const std::size_t ahead : {0, 4, 1024, 2048, 3072}) {
        for (int r = 0; r < 8; ++r)
            sources[r] = reinterpret_cast<const std::byte*>(from.data()) + ahead + 256 * (7 - r);
        check(copy_lines<1>, 1), check(copy_lines<2>, 2);
        if (__builtin_cpu_supports("avx2"))
            check(copy_lines_by_halves<1>, 1), check(copy_lines_by_halves<2>, 2);
        if (__builtin_cpu_supports("avx512f"))
            check(copy_lines_at_once<1>, 1), check(copy_lines_at_once<8>, 8);
    }
#endif
}

void test_past_the_cache() {
    const Numbers from = numbers(10'000, 1);
    for (const std::size_t n : {0, 1, 15, 16, 17, 990, 1023, 1024, 1025, 2047, 9000})
        for (const std::size_t shift : {0, 1, 2, 3}) {
            Numbers to(n + 8, -1), expected = to;
            copy_past_cache(reinterpret_cast<std::byte*>(to.data() + shift),
                            reinterpret_cast<const std::byte*>(from.data() + 1), 4 * n);
            std::copy_n(from.begin() + 1, n, expected.begin() + shift);
            CHECK(to == expected);
        }
    // runs of several lengths and places, fewer and more than are copied at once
    Numbers to(10'000, -1), expected = to;
    {
        RunsPastCache runs;
        std::size_t at = 0;
        for (int i = 0; i < 45; ++i) {
            const std::size_t n = i < 20 ? 40 : i < 30 ? 3 : 151 + i / 8;
            runs.add(reinterpret_cast<std::byte*>(&to[at]), reinterpret_cast<const std::byte*>(&from[7 * i]),
                     4 * n);
            std::copy_n(&from[7 * i], n, &expected[at]);
            at += n + i % 3;
        }
    }
    CHECK(to == expected);
}

}  // namespace

int main(int argc, char** argv) {
    fived::Environment mpi(argc, argv);
    const Communicator world = Communicator::world();
    HostMemory memory(world);
    const std::size_t chunk = HostMemory::slot_bytes / sizeof(std::int32_t);
    std::size_t small = 0;  // the largest that takes one round
    while (is_small(memory, (small + 1) * sizeof(std::int32_t))) ++small;
    choose_long_fill(memory, world);
    CHECK(long_fill == copy_past_cache || long_fill == copy_through_cache);
    CHECK(world.all_reduce(int(long_fill == copy_past_cache)) % world.size() == 0);  // all or none
    for (const Copy fill : {copy_past_cache, copy_through_cache}) {
        long_fill = fill;
        for (const std::size_t n :
             {std::size_t{0}, std::size_t{1}, std::size_t{2}, std::size_t{1025}, small, small + 1, chunk - 1,
              chunk, chunk + 1, 3 * chunk + 5, std::size_t{1} << 20})
            test_sizes(world, memory, n);
        for (const bool straight : {false, true}) {
            for (const std::size_t n : {0, 1, 300, 4001, 50'000}) test_gaps(world, memory, n, straight);
            for (const std::size_t tall : {16, 24, 256, 512}) test_columns(world, memory, tall, straight);
        }
    }
    test_arena(world);
    for (const std::size_t run : {4, 8, 16}) test_blocks(run);
    test_runs();
    test_mismatch(world);
    test_lines();
    test_past_the_cache();
    return world.all_reduce(failures) > 0;
}
