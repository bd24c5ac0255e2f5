// Collectives between the ranks of one host, through memory that all of them see.
//
// Each rank owns four slots of that memory, used in turn, and a counter that only it changes. A round:
//
//     write   what the others need, into a slot         a chunk so small that it stays in the cache
//     raise   my counter by one                         release: the slot was written before
//     meet    when every counter is as high as mine     acquire
//     read    what I need, out of the slots
//
// A rank writes one round ahead of what it reads, so that it has something to do before it waits:
//
//     write 0   write 1   meet 0   read 0   write 2   meet 1   read 1   write 3   ...
//
// Four slots are enough. A rank writes round r + 4 where round r was, only after it met the others in round r + 2;
// and they wrote round r + 2 after they had read round r.
//
// A collective is what is written and what is read, n ranks:
//
//                       write                               read
//     broadcast         root: the chunk                     the root's chunk
//     all-gather        my chunk                            the others' chunks
//     reduce-scatter    n - 1 pieces, for the others        the n - 1 pieces for me, and sum them with mine
//     all-to-all        n - 1 pieces, for the others        the n - 1 pieces for me
//       into arenas     all pieces, into the receivers'     nothing
//                       arenas (arena.hpp)
//     all-reduce        n - 1 pieces, for the others;       two rounds later, out of my own slot: the sums
//                       of the chunk two rounds ago:
//                       my piece's sum, to where its
//                       terms came from
//     small all-reduce  x                                   the others' x, and sum them with mine
//
// Cost of an all-reduce of x, for each of n ranks: |x| (n-1)/n copied into its slot, as many bytes of terms
// read and summed, as many sums written over them, as many copied out of its slot. All but x itself stays in the
// cache. Were every rank to read and sum all chunks, it would copy |x|, and read and sum |x| (n-1): for n = 2 as many
// bytes between the cores, but twice the additions and twice the lines of the cache. It takes one round instead of three,
// which is why a small all-reduce does it.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fived/error.hpp"
#include "fived/math/partition.hpp"
#include "fived/mpi/arena.hpp"
#include "fived/mpi/copies.hpp"
#include "fived/mpi/mpi.hpp"
#include "fived/mpi/strided.hpp"

namespace fived {

/// out[i] = in[0][i] + in[1][i] + ... for `count` elements, whatever their type and the operation. `out` may be
/// one of the inputs.
using Reduce = void (*)(std::byte* out, const std::byte* const* in, int inputs, std::size_t count);

/// What a rank says of the collective that it takes part in; all must say the same. 0 where ranks may differ.
struct Call {
    std::uint32_t operation = 0, type = 0;
    std::uint64_t elements = 0, root = 0, number = 0;
    bool operator==(const Call&) const = default;
};

/// Ranks of one host at the most.
inline constexpr int max_local_ranks = 512;

/// The place of a message in its receiver's arena, as the receiver describes it to the other ranks of the host.
struct Destination {
    static constexpr std::size_t most_dims = 3;
    std::uint64_t elsewhere = 1, offset = 0, run = 0;  // elsewhere: in memory that is not shared
    Strided<std::byte>::Dim outer[most_dims] = {};
};

/// The memory that the ranks of one host share, and the rounds that they take in it.
class HostMemory {
  public:
    static constexpr std::size_t slot_bytes = 64 << 10;
    static constexpr std::size_t large = 8 << 20;  // outputs beyond this go past the cache

    /// Collective. All ranks of `comm` must be on this host. Throws UsageError where there is no room for it.
    explicit HostMemory(const Communicator& comm) : rank_(comm.rank()), size_(comm.size()) {
        if (size_ > max_local_ranks)
            comm.fail("shared memory", "at most " + std::to_string(max_local_ranks) + " ranks of one host");
        const std::size_t granule = Arena::granule;
        const std::size_t places = (size_ * sizeof(Place) + granule - 1) / granule * granule;
        std::string name = "/fived-" + std::to_string(getpid()) + "-" + std::to_string(made_++);
        name.resize(64, '\0');
        comm.broadcast(std::as_writable_bytes(std::span(name)));
        int handle = -1, error = 0;
        if (rank_ == 0) {
            handle = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
            error = handle < 0 ? errno : posix_fallocate(handle, 0, off_t(places));
        }
        comm.broadcast(std::span(&error, 1));
        if (error == 0) {
            if (rank_ != 0) handle = shm_open(name.c_str(), O_RDWR, 0600);
            const auto arena = comm.all_reduce(arena_bytes(handle), MPI_MIN);
            error = map(comm, handle, places, arena);
            if (error != 0 && arena > 0) error = map(comm, handle, places, 0);
        }
        if (rank_ == 0) shm_unlink(name.c_str());  // every rank has it: it goes with the last of them
        if (handle >= 0 && error != 0) close(handle);
        if (error != 0)
            throw UsageError("/dev/shm has no room for " + std::to_string(places) + " bytes, which " +
                             std::to_string(size_) + " ranks of one host share: " + std::strerror(error) +
                             "; give it more (docker run --shm-size=1g)");
        places_ = reinterpret_cast<Place*>(file_->start);
    }
    HostMemory(const HostMemory&) = delete;
    HostMemory& operator=(const HostMemory&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }
    /// What `rank` writes in a round of the collective under way.
    std::byte* slot(int rank, std::size_t round) const { return slot_of(rank, round).data; }
    /// Memory of this rank that the others can write; it may outlive this. Null where there is no room.
    std::shared_ptr<std::byte> block(std::size_t bytes) { return arena_->block(bytes); }
    Destination describe(const Strided<std::byte>& place) const {
        if (place.size() == 0) return {.elsewhere = 0};
        if (place.outer.size() > Destination::most_dims || !arena_->holds(place.start, place.reach()))
            return {};
        Destination found{0, std::uint64_t(place.start - file_->start), place.run};
        std::ranges::copy(place.outer, found.outer);
        return found;
    }
    /// The same place where this rank has it mapped.
    Strided<std::byte> place_of(const Destination& destination) const {
        Strided<std::byte> place(file_->start + destination.offset, destination.run, {});
        for (const auto& dim : destination.outer)
            if (dim.count) place.outer.push_back(dim);
        return place;
    }
    /// Whether `rank` has come to the round in which this rank waits.
    bool is_here(int rank) const { return places_[rank].counter.load(std::memory_order_acquire) > met_; }

    /// A collective under way: write(round) fills this rank's slot, read(round) takes what the others wrote.
    template <class Write, class Read>
    class RoundsOf {
      public:
        RoundsOf(const Call& call, std::size_t count, Write write, Read read)
            : call_(call), count_(count), write_(std::move(write)), read_(std::move(read)) {}
        /// The same collective, gone as far, with its functions on the heap: to be kept in a queue.
        template <class W, class R>
        RoundsOf(RoundsOf<W, R> other)
            : call_(other.call_),
              count_(other.count_),
              written_(other.written_),
              done_(other.done_),
              write_(std::move(other.write_)),
              read_(std::move(other.read_)) {}
        const Call& call() const { return call_; }

      private:
        friend class HostMemory;
        template <class, class>
        friend class RoundsOf;
        Call call_;
        std::size_t count_, written_ = 0, done_ = 0;
        Write write_;
        Read read_;
    };

    /// Goes on as far as the other ranks allow; true when done. Where a rank's Call differs, calls mismatch(rank, its
    /// Call) and goes no further.
    template <class Rounds, class Mismatch>
    bool advance(Rounds& rounds, Mismatch mismatch) {
        while (rounds.done_ < rounds.count_) {
            while (rounds.written_ < std::min(rounds.count_, rounds.done_ + 2)) {
                if (rounds.written_ == 0) slot_of(rank_, 0).call = rounds.call_;
                rounds.write_(rounds.written_++);
                arrive();
                places_[rank_].counter.store(start_ + rounds.written_, std::memory_order_release);
            }
            for (int r = 0; r < size_; ++r)
                if (!is_here(r)) return false;
            bool same = true;
            for (int r = 0; rounds.done_ == 0 && r < size_; ++r)
                if (const Call& theirs = slot_of(r, 0).call; theirs != rounds.call_) {
                    mismatch(r, theirs);
                    same = false;
                }
            if (!same) return false;
            rounds.read_(rounds.done_++);
            ++met_;
        }
        arrive();
        start_ = met_;
        return true;
    }

  private:
    struct Slot {
        Call call;
        alignas(64) std::byte data[slot_bytes];
    };
    struct Place {
        alignas(128) std::atomic<std::uint64_t> counter;  // of rounds written; alone in its cache lines
        alignas(128) Slot slots[4];
    };
    /// Address space for a rank's arena: its share of half of the file system. None where processes have limits.
    std::uint64_t arena_bytes(int handle) const {
        rlimit space = {}, file = {};
        struct statvfs system = {};
        if (size_ == 1 || handle < 0 || fstatvfs(handle, &system) != 0 || getrlimit(RLIMIT_AS, &space) != 0 ||
            getrlimit(RLIMIT_FSIZE, &file) != 0 || space.rlim_cur != RLIM_INFINITY ||
            file.rlim_cur != RLIM_INFINITY)
            return 0;
        std::uint64_t bytes = std::uint64_t(system.f_blocks) * system.f_frsize;
        if (bytes == 0)  // no limit but the memory
            bytes = std::uint64_t(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
        return bytes / 2 / size_ / Arena::granule * Arena::granule;
    }
    /// Collective. Maps the places and, behind them, an arena for each rank. Takes the handle and returns 0, or returns the
    /// error of some rank.
    int map(const Communicator& comm, int handle, std::size_t places, std::size_t arena) {
        const std::size_t bytes = places + size_ * arena;
        void* start = MAP_FAILED;
        int error = handle < 0 ? EBADF : 0;
        if (error == 0 && ftruncate(handle, off_t(bytes)) != 0) error = errno;
        if (error == 0) {
            start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, handle, 0);
            if (start == MAP_FAILED) error = errno;
        }
        error = comm.all_reduce(error, MPI_MAX);
        if (error != 0) {
            if (start != MAP_FAILED) munmap(start, bytes);
            return error;
        }
        file_ = std::make_shared<SharedFile>(handle, static_cast<std::byte*>(start), bytes);
#ifdef MADV_DONTDUMP
        madvise(file_->start + places, size_ * arena, MADV_DONTDUMP);  // a dump would fill the holes
#endif
        const std::size_t begin = places + rank_ * arena;
        arena_ = std::make_shared<Arena>(file_, begin, begin + arena);
        return 0;
    }
    Slot& slot_of(int rank, std::size_t round) const { return places_[rank].slots[(start_ + round) % 4]; }
    static inline std::atomic<int> made_ = 0;
    int rank_, size_;
    std::shared_ptr<const SharedFile> file_;
    std::shared_ptr<Arena> arena_;
    Place* places_ = nullptr;            // one for each rank; zero at first
    std::uint64_t start_ = 0, met_ = 0;  // rounds before this collective; rounds done
};

using Step = std::function<void(std::size_t round)>;
using Rounds = HostMemory::RoundsOf<Step, Step>;

using Copy = void (*)(std::byte* to, const std::byte* from, std::size_t bytes);

/// How a rank fills its slots with a message of several rounds. Its core has to ask for every line of the cache that
/// another core has read, and waits longest where the two share no cache; stores past the cache ask for none. Where they
/// do share one, the reader finds in it what went through it. choose_long_fill() measures it.
inline std::atomic<Copy> long_fill = copy_past_cache;

/// How a rank fills its slots with a message of `bytes`. A single round waits for stores to arrive, which take longer past
/// the cache.
inline Copy into_slots(std::size_t bytes) {
    return bytes > HostMemory::slot_bytes ? long_fill.load(std::memory_order_relaxed) : copy_through_cache;
}

/// Collective. Chooses between the two, where some rank of `comm` has not: through the cache if that takes a tenth less
/// time. Ranks that share cores would time the scheduler, and choose nothing.
inline void choose_long_fill(HostMemory& m, const Communicator& comm) {
    static bool chosen = false;
    if (m.size() == 1) return;
    std::vector<int> any{m.size() > sysconf(_SC_NPROCESSORS_ONLN), !chosen};
    comm.all_reduce(std::span<int>(any), MPI_MAX);
    if (any[0] || !any[1]) return;
    chosen = true;
    constexpr std::size_t rounds = 32, bytes = HostMemory::slot_bytes;
    std::vector<std::byte> message(rounds * bytes), found(bytes);
    const std::size_t part = bytes / (m.size() - 1);  // as much to read however many ranks there are
    const auto seconds = [&](Copy fill) {
        comm.barrier();
        const auto start = std::chrono::steady_clock::now();
        HostMemory::RoundsOf moves(
            Call{}, rounds, [&](std::size_t i) { fill(m.slot(m.rank(), i), &message[i * bytes], bytes); },
            [&](std::size_t i) {
                for (int r = 0; r < m.size(); ++r)
                    if (r != m.rank()) copy_through_cache(found.data(), m.slot(r, i), part);
            });
        while (!m.advance(moves, [](int, const Call&) {})) sched_yield();
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    std::vector<double> least(2, 1e9);
    for (int i = 0; i < 7; ++i) {
        least[0] = std::min(least[0], seconds(copy_past_cache));
        least[1] = std::min(least[1], seconds(copy_through_cache));
    }
    comm.all_reduce(std::span<double>(least), MPI_MAX);
    long_fill = least[1] < 0.9 * least[0] ? copy_through_cache : copy_past_cache;
}

/// Chunks of `bytes` when each round carries `chunk` of them; at least one, so that ranks meet.
inline std::size_t rounds_of(std::size_t bytes, std::size_t chunk) {
    return std::max<std::size_t>(1, (bytes + chunk - 1) / chunk);
}

/// The bytes of a chunk, whole elements of `item` bytes.
inline std::size_t chunk_of(std::size_t room, std::size_t item) {
    return room / item * item;
}

/// Whether an all-reduce takes less time in one round, in which each rank reads all terms, than in three. On two ranks one
/// round is faster up to 4 KiB where a cache line takes long from core to core, and up to 16 KiB where it does not.
inline bool is_small(const HostMemory& m, std::size_t bytes) {
    return bytes * m.size() <= 8192;
}

/// An all-reduce that is_small. Sums are equal on all ranks to the last bit: each adds in the order of the ranks.
inline auto small_all_reduce(HostMemory& m, const Call& call, std::byte* x, std::size_t bytes,
                             std::size_t item, Reduce reduce, int root = -1) {
    const auto write = [=, &m](std::size_t) { copy_through_cache(m.slot(m.rank(), 0), x, bytes); };
    const auto read = [=, &m](std::size_t) {
        const std::byte* terms[max_local_ranks];
        for (int r = 0; r < m.size(); ++r) terms[r] = m.slot(r, 0);
        if (root < 0 || root == m.rank()) reduce(x, terms, m.size(), bytes / item);
    };
    return HostMemory::RoundsOf(call, 1, write, read);
}

/// In place: P to R. With `root` >= 0 only that rank gets the sum.
inline Rounds all_reduce(HostMemory& m, const Call& call, std::byte* x, std::size_t bytes, std::size_t item,
                         Reduce reduce, int root = -1) {
    if (is_small(m, bytes)) return small_all_reduce(m, call, x, bytes, item, reduce, root);
    const std::size_t chunk = chunk_of(HostMemory::slot_bytes, item);
    /// Piece r of chunk i, in x and in a slot. Beyond the end there are empty chunks.
    struct Piece {
        std::byte* x;
        std::size_t place, length;
    };
    const auto piece = [=, &m](std::size_t i, int r) {
        const std::size_t begin = std::min(bytes, i * chunk), count = std::min(chunk, bytes - begin) / item;
        const std::size_t from = cut(count, m.size(), r) * item, to = cut(count, m.size(), r + 1) * item;
        return Piece{x + begin + from, from, to - from};
    };
    const auto share = [=, &m](std::size_t i) {
        for (int r = 0; r < m.size(); ++r)
            if (const Piece p = piece(i, r); r != m.rank())
                copy_through_cache(m.slot(m.rank(), i) + p.place, p.x, p.length);
    };
    // In blocks that are still in the nearest cache when the sum is copied.
    const std::size_t block = chunk_of(4096, item);
    const auto sum = [=, &m](std::size_t i) {
        const Piece mine = piece(i, m.rank());
        for (std::size_t at = 0; at < mine.length; at += block) {
            const std::size_t n = std::min(block, mine.length - at);
            const auto term = [&](int r) {
                return (r == m.rank() ? mine.x : m.slot(r, i) + mine.place) + at;
            };
            const std::byte* terms[max_local_ranks];
            for (int r = 0; r < m.size(); ++r) terms[r] = term(r);
            std::byte* const total = term(root < 0 ? m.rank() : root);
            reduce(total, terms, m.size(), n / item);
            for (int r = 0; root < 0 && r < m.size(); ++r)
                if (r != m.rank()) copy_through_cache(term(r), total, n);
        }
    };
    const auto take = [=, &m](std::size_t i) {
        for (int r = 0; r < m.size(); ++r)
            if (const Piece p = piece(i, r); r != m.rank() && (root < 0 || root == m.rank()))
                copy_through_cache(p.x, m.slot(m.rank(), i) + p.place, p.length);
    };
    return {call, rounds_of(bytes, chunk) + 2,
            [=](std::size_t i) {
                share(i);
                if (i >= 2) sum(i - 2);
            },
            [=](std::size_t i) {
                if (i >= 2) take(i - 2);
            }};
}

/// In place: the root's x to R.
inline Rounds broadcast(HostMemory& m, const Call& call, std::byte* x, std::size_t bytes, int root) {
    const std::size_t chunk = HostMemory::slot_bytes;
    const auto length = [=](std::size_t i) { return std::min(chunk, bytes - std::min(bytes, i * chunk)); };
    const auto fill = into_slots(bytes);
    const auto copy = bytes > HostMemory::large ? copy_past_cache : copy_through_cache;
    return {call, rounds_of(bytes, chunk),
            [=, &m](std::size_t i) {
                if (m.rank() == root) fill(m.slot(root, i), x + i * chunk, length(i));
            },
            [=, &m](std::size_t i) {
                if (m.rank() != root) copy(x + i * chunk, m.slot(root, i), length(i));
            }};
}

/// S to R: `out[r]` gets the `bytes` of rank r. With `root` >= 0 only there (a gather).
inline Rounds all_gather(HostMemory& m, const Call& call, const std::byte* x, std::vector<std::byte*> out,
                         std::size_t bytes, int root = -1) {
    const std::size_t chunk = HostMemory::slot_bytes;
    const auto length = [=](std::size_t i) { return std::min(chunk, bytes - std::min(bytes, i * chunk)); };
    const auto fill = into_slots(bytes);
    const auto copy = bytes * m.size() > HostMemory::large ? copy_past_cache : copy_through_cache;
    const bool wanted = root < 0 || root == m.rank();
    return {call, rounds_of(bytes, chunk),
            [=, &m](std::size_t i) {
                if (root != m.rank()) fill(m.slot(m.rank(), i), x + i * chunk, length(i));
            },
            [=, &m](std::size_t i) {
                for (int r = 0; wanted && r < m.size(); ++r)
                    if (r != m.rank() || out[r] != x)
                        copy(out[r] + i * chunk, r == m.rank() ? x + i * chunk : m.slot(r, i), length(i));
            }};
}

/// P to S: `in[r]` are the `bytes` for rank r; `out` gets the sum of what all have for this rank.
inline Rounds reduce_scatter(HostMemory& m, const Call& call, std::vector<const std::byte*> in,
                             std::byte* out, std::size_t bytes, std::size_t item, Reduce reduce) {
    const std::size_t chunk = chunk_of(HostMemory::slot_bytes / m.size(), item);
    const auto fill = into_slots(bytes);
    const auto length = [=](std::size_t i) { return std::min(chunk, bytes - std::min(bytes, i * chunk)); };
    return {call, rounds_of(bytes, chunk),
            [=, &m](std::size_t i) {
                for (int r = 0; r < m.size(); ++r)
                    if (r != m.rank()) fill(m.slot(m.rank(), i) + r * chunk, in[r] + i * chunk, length(i));
            },
            [=, &m](std::size_t i) {
                const std::byte* terms[max_local_ranks];
                for (int r = 0; r < m.size(); ++r)
                    terms[r] = r == m.rank() ? in[r] + i * chunk : m.slot(r, i) + m.rank() * chunk;
                if (length(i)) reduce(out + i * chunk, terms, m.size(), length(i) / item);
            }};
}

/// `in[r]` goes to rank r, `out[r]` comes from there. `longest` is the longest piece of all, between any two.
inline Rounds all_to_all(HostMemory& m, const Call& call, std::vector<Strided<const std::byte>> in,
                         std::vector<Strided<std::byte>> out, std::size_t longest) {
    const std::size_t chunk = HostMemory::slot_bytes / m.size();
    const auto begin = [=](const auto& piece, std::size_t i) { return std::min(piece.size(), i * chunk); };
    const auto length = [=](const auto& piece, std::size_t i) {
        return std::min(chunk, piece.size() - begin(piece, i));
    };
    const auto fill = into_slots(longest);
    const auto copy = longest * m.size() > HostMemory::large ? copy_past_cache : copy_through_cache;
    return {
        call, rounds_of(longest, chunk),
        [=, &m](std::size_t i) {
            for (int r = 0; r < m.size(); ++r) {
                if (r != m.rank())
                    in[r].gather(begin(in[r], i), length(in[r], i), m.slot(m.rank(), i) + r * chunk, fill);
            }
        },
        [=, &m](std::size_t i) {
            for (int r = 0; r < m.size(); ++r) {
                const std::size_t first = begin(out[r], i), bytes = length(out[r], i);
                const bool through_slot = r != m.rank() || in[r].crosswise();
                std::byte* const slot = m.slot(r, i) + m.rank() * chunk;
                if (r == m.rank() && through_slot) in[r].gather(first, bytes, slot, fill);
                out[r].each(first, bytes, [&](std::byte* to, std::size_t at, std::size_t n) {
                    if (through_slot) return copy(to, slot + at, n);
                    in[r].each(first + at, n, [&](const std::byte* from, std::size_t more, std::size_t k) {
                        copy(to + more, from, k);
                    });
                });
            }
        }};
}

/// An all-to-all into the arenas of the receivers: `in[r]` is copied once, to `places[r]` in the arena of rank r.
inline Rounds all_to_all_into_arenas(HostMemory& m, const Call& call,
                                     std::vector<Strided<const std::byte>> in,
                                     std::vector<Strided<std::byte>> places, std::size_t longest) {
    // 64 KiB for each rank in turn: pieces of one matrix lie side by side, and ranks write to different ranks at a time.
    const std::size_t part = 1 << 16, chunk = std::max<std::size_t>(part, (1 << 20) / m.size() / part * part);
    return {call, rounds_of(longest, chunk),
            [=, rank = m.rank(), size = m.size()](std::size_t i) {
                RunsPastCache runs;
                for (std::size_t begin = i * chunk; begin < (i + 1) * chunk; begin += part)
                    for (int k = 0; k < size; ++k) {
                        const int r = (rank + k) % size;
                        const std::size_t left = in[r].size() - std::min(in[r].size(), begin);
                        copy_message(places[r], in[r], begin, std::min(part, left), runs);
                    }
            },
            [](std::size_t) {}};
}

/// Nothing but the meeting.
inline Rounds barrier(const Call& call) {
    return {call, 1, [](std::size_t) {}, [](std::size_t) {}};
}

}  // namespace fived
