// Collectives between ranks of several hosts: shared memory inside each host, messages between hosts.
//
// A collective is a list of stages. A stage is rounds in the host's memory, or messages, or both at once; the next one
// begins when it is done. On one host a collective is one stage, and everything below is about the others:
//
//     agree      every rank learns what every rank calls: each host's calls in its memory, then a report from host to
//                host. A call that differs is an error on every rank before anything has moved.
//     combine    in a host: each local rank ends with the host's sum of the pieces that it answers for
//     share      in a host: each local rank ends with the pieces of all local ranks
//
// Each byte of a sum crosses between hosts as often as it must and no more, on as many links as there are lanes. A
// lane is the ranks of one local index, one on each host; there are as many as the smallest host has ranks. Two
// hosts of two ranks, lanes a and b:
//
//     all-reduce   combine   lane i has the host's sum of slice i      host 0: a0 b0    host 1: a1 b1
//                  lanes     reduce-scatter between hosts, then        a0 <-> a1 and b0 <-> b1, at the same time
//                            all-gather between hosts
//                  share     the slices of all lanes                   a b everywhere
//
// Where hosts have 3 and 1 ranks there is one lane: leaders. Where each has 8, eight links carry an eighth each.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "fived/math/partition.hpp"
#include "fived/mpi/mpi.hpp"
#include "fived/mpi/shared_memory.hpp"

namespace fived {

struct Message {
    Request request;
    int peer;
};

/// Part of a collective; done when its rounds and all its messages are.
struct Stage {
    std::optional<Rounds> rounds;
    std::vector<Message> messages;
    bool exposes = false;  // other ranks may write the results from now on, until the collective is done
};
/// Called in turn, each when the one before is done. What they hold lives until all are.
using Stages = std::vector<std::function<Stage()>>;

/// Rank `rank` of the group calls something else than this one.
struct Differs : std::runtime_error {
    Differs(int rank, const Call& mine, const Call& theirs)
        : runtime_error("calls differ"), rank(rank), mine(mine), theirs(theirs) {}
    int rank;
    Call mine, theirs;
};

/// Pieces of memory, read or written one behind the other.
using Inputs = std::vector<std::span<const std::byte>>;
using Outputs = std::vector<std::span<std::byte>>;
/// The same with gaps.
using StridedInputs = std::vector<Strided<const std::byte>>;
using StridedOutputs = std::vector<Strided<std::byte>>;

template <class Span>
std::size_t length_of(const std::vector<Span>& pieces) {
    std::size_t bytes = 0;
    for (const Span& piece : pieces) bytes += piece.size();
    return bytes;
}

/// Calls use(part, at) for what lies from `begin` to `end`; `at` is where the part begins, counted from `begin`.
template <class Span, class Use>
void between(const std::vector<Span>& pieces, std::size_t begin, std::size_t end, Use use) {
    std::size_t start = 0;
    for (const Span& piece : pieces) {
        const std::size_t from = std::max(begin, start), to = std::min(end, start + piece.size());
        if (from < to) use(piece.subspan(from - start, to - from), from - begin);
        start += piece.size();
    }
}

/// P to S inside a host: `in[r]` are the pieces that local rank r answers for; `out` gets the sum of mine.
inline Rounds combine(HostMemory& m, const Call& call, std::vector<Inputs> in, std::byte* out,
                      std::size_t item, Reduce reduce) {
    const std::size_t chunk = chunk_of(HostMemory::slot_bytes / m.size(), item);
    const std::size_t mine = length_of(in[m.rank()]);
    std::size_t longest = 0;
    for (const Inputs& pieces : in) longest = std::max(longest, length_of(pieces));
    const auto fill = into_slots(longest);
    return {call, rounds_of(longest, chunk),
            [=, &m](std::size_t i) {
                for (int r = 0; r < m.size(); ++r)
                    between(in[r], i * chunk, (i + 1) * chunk, [&](auto part, std::size_t at) {
                        fill(m.slot(m.rank(), i) + r * chunk + at, part.data(), part.size());
                    });
            },
            [=, &m](std::size_t i) {
                const std::byte* terms[max_local_ranks];
                for (int r = 0; r < m.size(); ++r) terms[r] = m.slot(r, i) + m.rank() * chunk;
                const std::size_t bytes = std::min(chunk, mine - std::min(mine, i * chunk));
                if (bytes) reduce(out + i * chunk, terms, m.size(), bytes / item);
            }};
}

/// S to R inside a host: `pieces[r]` are filled on local rank r, and then everywhere.
inline Rounds share(HostMemory& m, const Call& call, std::vector<Outputs> pieces) {
    const std::size_t chunk = HostMemory::slot_bytes;
    std::size_t longest = 0;
    for (const Outputs& some : pieces) longest = std::max(longest, length_of(some));
    const auto fill = into_slots(longest);
    return {call, rounds_of(longest, chunk),
            [=, &m](std::size_t i) {
                between(pieces[m.rank()], i * chunk, (i + 1) * chunk, [&](auto part, std::size_t at) {
                    fill(m.slot(m.rank(), i) + at, part.data(), part.size());
                });
            },
            [=, &m](std::size_t i) {
                for (int r = 0; r < m.size(); ++r)
                    if (r != m.rank())
                        between(pieces[r], i * chunk, (i + 1) * chunk, [&](auto part, std::size_t at) {
                            copy_through_cache(part.data(), m.slot(r, i) + at, part.size());
                        });
            }};
}

/// The ranks of a communicator by host, and collectives between them. Each returns its stages; the buffers must live
/// until the last is done. Sizes are in bytes, `item` is that of an element.
class Hosts {
  public:
    /// Collective. Ranks with the same `color` are taken to share memory; -1: MPI says who does. `largest`: bytes of one
    /// message at most. Throws MpiError.
    Hosts(const Communicator& comm, int color, std::size_t largest)
        : rank_(comm.rank()), size_(comm.size()), largest_(std::min(largest, max_message)) {
        MPI_Comm part = MPI_COMM_NULL;
        comm.check(color < 0
                       ? MPI_Comm_split_type(comm.handle(), MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &part)
                       : MPI_Comm_split(comm.handle(), color, rank_, &part),
                   "MPI_Comm_split");
        const Communicator host(part, comm.name());
        MPI_Comm_free(&part);
        memory_ = std::make_unique<HostMemory>(host);
        choose_long_fill(*memory_, host);
        index_ = host.rank();
        // a host goes by its lowest rank
        int leader = rank_;
        host.broadcast(std::span(&leader, 1));
        std::vector<int> leaders(size_), number(size_);
        leaders[rank_] = leader;
        comm.all_reduce(std::span(leaders));
        for (int r = 0; r < size_; ++r) {
            if (leaders[r] == r) {
                number[r] = count();
                hosts_.emplace_back();
            }
            of_rank_.push_back(number[leaders[r]]);
            hosts_[of_rank_[r]].push_back(r);
        }
        here_ = of_rank_[rank_];
        lanes_ = int(std::ranges::min_element(hosts_, {}, &std::vector<int>::size)->size());
        if (count() > 1) comm_.emplace(comm.dup());
    }

    int count() const { return int(hosts_.size()); }
    bool is_on_this_host(int rank) const { return of_rank_[rank] == here_; }
    HostMemory& memory() const { return *memory_; }
    /// The ranks on the host of `rank`, in order. Those of this host are the local ranks of its memory.
    const std::vector<int>& host_of(int rank) const { return hosts_[of_rank_[rank]]; }

    /// In place: P to R. With `root` >= 0 only there: every other host sends its sum once.
    Stages all_reduce(const Call& call, std::byte* x, std::size_t bytes, std::size_t item, Reduce reduce,
                      int root = -1) {
        if (count() == 1)
            return one([=, this] { return fived::all_reduce(*memory_, call, x, bytes, item, reduce, root); });
        const auto copy = root < 0 || root == rank_ ? nullptr : room(bytes);
        const std::span<std::byte> y(copy ? copy.get() : x, bytes);
        const auto slice = [=, this](int lane) { return cut_out(y, item, lanes_, lane); };
        Stages stages = agree(call);
        stages.push_back([=, this] {
            if (copy) copy_through_cache(copy.get(), x, bytes);
            std::vector<Inputs> in;
            for (int r = 0; r < memory_->size(); ++r) in.push_back({slice(r)});
            return Stage{combine(*memory_, call, in, slice(index_).data(), item, reduce), {}};
        });
        if (index_ < lanes_ && root < 0) sum_on_all_hosts(stages, slice(index_), item, reduce);
        if (index_ < lanes_ && root >= 0)
            sum_on_one_host(stages, slice(index_), item, reduce, of_rank_[root]);
        stages.push_back([=, this] {
            std::vector<Outputs> pieces;
            for (int r = 0; r < memory_->size(); ++r) pieces.push_back({slice(r)});
            return Stage{share(*memory_, call, pieces), {}};
        });
        return stages;
    }

    /// In place: the root's x to R. Over the lanes of its host, each a slice.
    Stages broadcast(const Call& call, std::byte* x, std::size_t bytes, int root) {
        const int from = of_rank_[root];
        const auto in_host = [=, this] {
            const int local = int(std::ranges::find(hosts_[from], root) - hosts_[from].begin());
            return fived::broadcast(*memory_, call, x, bytes, local);
        };
        if (count() == 1) return one(in_host);
        const auto slice = [=, this](int lane) { return cut_out({x, bytes}, 1, lanes_, lane); };
        Stages stages = agree(call);
        stages.push_back([=, this] { return from == here_ ? Stage{in_host(), {}} : Stage{}; });
        stages.push_back([=, this] {
            Stage stage;
            if (index_ >= lanes_) return stage;
            if (from == here_)
                for_other_hosts([&](int h) { send(stage, slice(index_), hosts_[h][index_]); });
            else
                receive(stage, slice(index_), hosts_[from][index_]);
            return stage;
        });
        stages.push_back([=, this] {
            std::vector<Outputs> pieces;
            for (int r = 0; r < memory_->size(); ++r) pieces.push_back({slice(r)});
            return from == here_ ? Stage{} : Stage{share(*memory_, call, pieces), {}};
        });
        return stages;
    }

    /// S to R: `out[r]` gets the `bytes` of rank r. Each rank's cross to each other host once, to its keeper there.
    Stages all_gather(const Call& call, const std::byte* x, std::vector<std::byte*> out, std::size_t bytes) {
        if (count() == 1) return one([=, this] { return fived::all_gather(*memory_, call, x, out, bytes); });
        Stages stages = agree(call);
        stages.push_back([=, this] {
            Stage stage;
            copy_through_cache(out[rank_], x, bytes);
            for_other_hosts([&](int h) {
                send(stage, {x, bytes}, keeper(h, index_));
                for_kept(h, [&](int r) { receive(stage, {out[r], bytes}, r); });
            });
            return stage;
        });
        stages.push_back([=, this] {
            std::vector<Outputs> pieces(memory_->size());
            for (int h = 0; h < count(); ++h)
                for (std::size_t i = 0; i < hosts_[h].size(); ++i)
                    pieces[i % pieces.size()].push_back({out[hosts_[h][i]], bytes});
            return Stage{share(*memory_, call, pieces), {}};
        });
        return stages;
    }

    /// S to the root alone. Straight there: nothing is saved on the way.
    Stages gather(const Call& call, const std::byte* x, std::vector<std::byte*> out, std::size_t bytes,
                  int root) {
        if (count() == 1)
            return one([=, this] { return fived::all_gather(*memory_, call, x, out, bytes, root); });
        Inputs in(size_);
        Outputs places(size_);
        in[root] = {x, bytes};
        for (int r = 0; rank_ == root && r < size_; ++r) places[r] = {out[r], bytes};
        Stages stages = agree(call);
        stages.push_back(
            direct(call, {in.begin(), in.end()}, {places.begin(), places.end()}, [=] { return bytes; }));
        return stages;
    }

    /// `in[r]`, on the root, goes to rank r, who has room for `out`.
    Stages scatter(const Call& call, Inputs in, std::span<std::byte> out, int root) {
        Outputs places(size_);
        places[root] = out;
        Stages stages = agree(call);
        stages.push_back(
            direct(call, {in.begin(), in.end()}, {places.begin(), places.end()}, [=] { return out.size(); }));
        return stages;
    }

    /// P to S: `in[r]` are the `bytes` for rank r; `out` gets the sum of what all have for this rank. Each host sends
    /// the host's sum for each rank elsewhere, from its keeper.
    Stages reduce_scatter(const Call& call, std::vector<const std::byte*> in, std::byte* out,
                          std::size_t bytes, std::size_t item, Reduce reduce) {
        if (count() == 1)
            return one(
                [=, this] { return fived::reduce_scatter(*memory_, call, in, out, bytes, item, reduce); });
        std::vector<Inputs> pieces(memory_->size());
        std::vector<int> mine;  // the ranks whose sums on this host I answer for
        for (int h = 0; h < count(); ++h) {
            for (std::size_t i = 0; i < hosts_[h].size(); ++i)
                pieces[i % pieces.size()].push_back({in[hosts_[h][i]], bytes});
            for_kept(h, [&](int r) { mine.push_back(r); });
        }
        const auto sums = room(bytes * mine.size()), terms = room(bytes * count());
        Stages stages = agree(call);
        stages.push_back(
            [=, this] { return Stage{combine(*memory_, call, pieces, sums.get(), item, reduce), {}}; });
        stages.push_back([=, this] {
            Stage stage;
            for_other_hosts([&](int h) { receive(stage, {&terms[h * bytes], bytes}, keeper(h, index_)); });
            for (std::size_t i = 0; i < mine.size(); ++i)
                if (mine[i] == rank_)
                    copy_through_cache(&terms[here_ * bytes], &sums[i * bytes], bytes);
                else
                    send(stage, {&sums[i * bytes], bytes}, mine[i]);
            return stage;
        });
        stages.push_back([=, this] {
            sum(out, terms.get(), bytes, item, reduce);
            return Stage{};
        });
        return stages;
    }

    /// `in[r]` goes to rank r, `out[r]` comes from there. Throws std::runtime_error on every rank, naming two, where one
    /// sends another number of bytes than the other expects.
    Stages all_to_all(const Call& call, StridedInputs in, StridedOutputs out) {
        // First all tell all how long their pieces are: to each rank, then from each rank.
        const std::size_t n = size_, row = 2 * n;
        const auto all = std::make_shared<std::vector<std::uint64_t>>(row * (n + 1));
        std::uint64_t* const mine = &(*all)[row * n];
        std::vector<std::byte*> rows;
        for (std::size_t r = 0; r < n; ++r) {
            mine[r] = in[r].size();
            mine[n + r] = out[r].size();
            rows.push_back(reinterpret_cast<std::byte*>(&(*all)[row * r]));
        }
        Stages stages = all_gather(call, reinterpret_cast<std::byte*>(mine), rows, row * sizeof(*mine));
        stages.push_back([=] {
            for (std::size_t r = 0; r < n; ++r)
                for (std::size_t to = 0; to < n; ++to)
                    if (const auto given = (*all)[row * r + to], room = (*all)[row * to + n + r];
                        given != room)
                        throw std::runtime_error("rank " + std::to_string(r) + " sends " +
                                                 std::to_string(given) + " bytes to rank " +
                                                 std::to_string(to) + ", which expects " +
                                                 std::to_string(room));
            return Stage{};
        });
        // Long messages go straight into the receivers' arenas, if all places of this host lie in them.
        const auto places = std::make_shared<std::vector<Destination>>();
        stages.push_back([=, this] {
            if (std::ranges::max(*all) < straight_from) return Stage{};
            const std::size_t local = memory_->size();
            places->resize(local * (local + 1));
            Destination* const mine = &(*places)[local * local];
            std::vector<std::byte*> rows;
            for (std::size_t r = 0; r < local; ++r) {
                const auto& place = out[hosts_[here_][r]];
                // What is still to be sent must not be overwritten.
                const bool safe =
                    std::ranges::none_of(in, [&](const auto& piece) { return overlap(piece, place); });
                if (int(r) == index_ && safe)
                    mine[r].elsewhere = 0;  // nobody else writes it
                else if (safe)
                    mine[r] = memory_->describe(place);
                rows.push_back(reinterpret_cast<std::byte*>(&(*places)[local * r]));
            }
            return Stage{fived::all_gather(*memory_, call, reinterpret_cast<std::byte*>(mine), rows,
                                           local * sizeof(Destination)),
                         {},
                         true};
        });
        stages.push_back(direct(call, in, out, [=] { return std::ranges::max(*all); }, places));
        return stages;
    }

    /// Nothing but the meeting.
    Stages barrier(const Call& call) {
        return count() == 1 ? one([=] { return fived::barrier(call); }) : agree(call);
    }

  private:
    static bool overlap(const Strided<const std::byte>& a, const Strided<std::byte>& b) {
        return std::less<>()(a.start, b.start + b.reach()) && std::less<>()(b.start, a.start + a.reach());
    }
    static Stages one(std::function<Rounds()> rounds) {
        return {[=] { return Stage{rounds(), {}}; }};
    }
    static std::shared_ptr<std::byte[]> room(std::size_t bytes) {
        return std::make_unique_for_overwrite<std::byte[]>(bytes);
    }
    /// Piece `i` of `pieces`, whole elements; nothing beyond the last.
    static std::span<std::byte> cut_out(std::span<std::byte> x, std::size_t item, int pieces, int i) {
        if (i >= pieces) return {};
        const std::size_t n = x.size() / item, begin = cut(n, pieces, i), end = cut(n, pieces, i + 1);
        return x.subspan(begin * item, (end - begin) * item);
    }
    /// `terms`: one for each host.
    void sum(std::byte* out, const std::byte* terms, std::size_t bytes, std::size_t item,
             Reduce reduce) const {
        std::vector<const std::byte*> in;
        for (int h = 0; h < count(); ++h) in.push_back(terms + h * bytes);
        if (bytes) reduce(out, in.data(), count(), bytes / item);
    }

    /// In place: x of a lane, P to R over the hosts: reduce-scatter, then all-gather.
    void sum_on_all_hosts(Stages& stages, std::span<std::byte> x, std::size_t item, Reduce reduce) const {
        const auto part = [=, this](int host) { return cut_out(x, item, count(), host); };
        const std::size_t length = part(here_).size();
        const auto terms = room(length * count());
        stages.push_back([=, this] {
            Stage stage;
            copy_through_cache(&terms[here_ * length], part(here_).data(), length);
            for_other_hosts([&](int h) {
                receive(stage, {&terms[h * length], length}, hosts_[h][index_]);
                send(stage, part(h), hosts_[h][index_]);
            });
            return stage;
        });
        stages.push_back([=, this] {
            Stage stage;
            sum(part(here_).data(), terms.get(), length, item, reduce);
            for_other_hosts([&](int h) {
                receive(stage, part(h), hosts_[h][index_]);
                send(stage, part(here_), hosts_[h][index_]);
            });
            return stage;
        });
    }
    /// In place: x of a lane, P to host `root` alone. A binomial tree: in each round half of the hosts that are left send
    /// their sums, and are done.
    void sum_on_one_host(Stages& stages, std::span<std::byte> x, std::size_t item, Reduce reduce,
                         int root) const {
        const auto term = room(x.size());
        const int place = (here_ - root + count()) % count();
        for (int step = 1; step < count() && place % step == 0; step *= 2) {
            const bool sends = place & step;
            if ((place ^ step) >= count()) continue;
            const int peer = hosts_[((place ^ step) + root) % count()][index_];
            stages.push_back([=, this] {
                Stage stage;
                if (sends)
                    send(stage, x, peer);
                else
                    receive(stage, {term.get(), x.size()}, peer);
                return stage;
            });
            if (sends) continue;
            stages.push_back([=] {
                const std::byte* both[] = {x.data(), term.get()};
                if (!x.empty()) reduce(x.data(), both, 2, x.size() / item);
                return Stage{};
            });
        }
    }

    template <class Use>
    void for_other_hosts(Use use) const {
        for (int h = 0; h < count(); ++h)
            if (h != here_) use(h);
    }
    /// Who, on host `host`, answers for ranks of local index `index` elsewhere.
    int keeper(int host, int index) const { return hosts_[host][index % hosts_[host].size()]; }
    /// The ranks of `host` for which this rank answers here.
    template <class Use>
    void for_kept(int host, Use use) const {
        for (std::size_t i = index_; i < hosts_[host].size(); i += memory_->size()) use(hosts_[host][i]);
    }

    void send(Stage& stage, std::span<const std::byte> data, int to) const {
        for (std::size_t i = 0; i < data.size(); i += largest_)
            stage.messages.push_back(
                {comm_->start_send(data.subspan(i, std::min(largest_, data.size() - i)), to), to});
    }
    void receive(Stage& stage, std::span<std::byte> data, int from) const {
        for (std::size_t i = 0; i < data.size(); i += largest_)
            stage.messages.push_back(
                {comm_->start_receive(data.subspan(i, std::min(largest_, data.size() - i)), from), from});
    }

    /// What a host has to say of a call: what its first rank calls, and the first that calls something else.
    struct Report {
        Call call, other;
        int different = -1;
    };
    /// Nothing on one host: the first round of what follows does it.
    Stages agree(const Call& call) {
        if (count() == 1) return {};
        const auto calls = std::make_shared<std::vector<Call>>(memory_->size());
        const auto reports = std::make_shared<std::vector<Report>>(count());
        Stages stages;
        stages.push_back([=, this] {
            (*calls)[index_] = call;
            std::vector<Outputs> pieces;
            for (Call& one : *calls) pieces.push_back({std::as_writable_bytes(std::span(&one, 1))});
            return Stage{share(*memory_, {}, pieces), {}};
        });
        stages.push_back([=, this] {
            Report& ours = (*reports)[here_];
            ours.call = ours.other = calls->front();
            for (std::size_t i = 0; i < calls->size() && ours.different < 0; ++i)
                if (!((*calls)[i] == ours.call)) {
                    ours.other = (*calls)[i];
                    ours.different = hosts_[here_][i];
                }
            Stage stage;
            for_other_hosts([&](int h) {
                receive(stage, std::as_writable_bytes(std::span(&(*reports)[h], 1)), keeper(h, index_));
                for_kept(h, [&](int r) { send(stage, std::as_bytes(std::span(&ours, 1)), r); });
            });
            return stage;
        });
        stages.push_back([=, this] {
            for (int h = 0; h < count(); ++h) {
                if (h == here_)
                    for (std::size_t i = 0; i < calls->size(); ++i)
                        if (!((*calls)[i] == call)) throw Differs(hosts_[h][i], call, (*calls)[i]);
                const Report& report = (*reports)[h];
                if (!(report.call == call)) throw Differs(hosts_[h][0], call, report.call);
                if (report.different >= 0) throw Differs(report.different, call, report.other);
            }
            return Stage{};
        });
        return stages;
    }

    /// `in[r]` to rank r: through the memory inside the host, by messages elsewhere, both at once. `places`: on each
    /// local rank, that of the message from each other.
    std::function<Stage()> direct(const Call& call, StridedInputs in, StridedOutputs out,
                                  std::function<std::size_t()> longest,
                                  std::shared_ptr<std::vector<Destination>> places = {}) {
        return [=, this] {
            StridedInputs near_in;
            StridedOutputs near_out;
            for (const int r : hosts_[here_]) {
                near_in.push_back(in[r]);
                near_out.push_back(out[r]);
            }
            const bool straight =
                places && !places->empty() && std::ranges::none_of(*places, &Destination::elsewhere);
            for (int r = 0; straight && r < memory_->size(); ++r)
                if (r != index_) near_out[r] = memory_->place_of((*places)[r * memory_->size() + index_]);
            Stage stage{(straight ? all_to_all_into_arenas : fived::all_to_all)(*memory_, call, near_in,
                                                                                near_out, longest()),
                        {}};
            for (int r = 0; r < size_; ++r)
                if (of_rank_[r] != here_) {
                    receive(stage, out[r].whole(), r);
                    send(stage, in[r].whole(), r);
                }
            return stage;
        };
    }

    static constexpr std::size_t straight_from = 1 << 18;  // bytes
    int rank_, size_, index_ = 0, here_ = 0, lanes_ = 1;
    std::size_t largest_;
    std::vector<std::vector<int>> hosts_;
    std::vector<int> of_rank_;
    std::unique_ptr<HostMemory> memory_;
    std::optional<Communicator> comm_;  // between hosts
};

}  // namespace fived
