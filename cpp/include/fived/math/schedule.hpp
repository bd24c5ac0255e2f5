// A pipeline's schedule is data: the lists that pp_schedules.py prints, read, proved right and simulated here.
//
//     F 0 0;SX 0 0;RG 0 0;F 0 1;SX 0 1;RG 0 1;B 0 0;B 0 1       rank 0: what it does, the stage, the micro-batch
//     RX 1 0;F 1 0;RX 1 1;B 1 0;SG 1 0;F 1 1;B 1 1;SG 1 1       rank 1
//
//     F forward   B backward, or its halves: I for the input, W for the weights
//     SX RX send and receive activations   SG RG send and receive their gradient
//
// A message is started, never waited for, where it stands: a computation waits for what it reads. What goes from one
// rank to another arrives in the order in which it was sent.
#pragma once

#include <algorithm>
#include <array>
#include <compare>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fived/error.hpp"
#include "fived/named.hpp"

namespace fived {

enum class Op { F, B, I, W, SX, RX, SG, RG };
constexpr auto names(Op) {
    return std::array{"F", "B", "I", "W", "SX", "RX", "SG", "RG"};
}

/// What a rank does for one micro-batch in one stage.
struct Instruction {
    Op op = Op::F;
    int stage = 0, micro = 0;

    auto operator<=>(const Instruction&) const = default;
    bool computes() const { return op <= Op::W; }
    bool sends() const { return op == Op::SX || op == Op::SG; }
    /// The receive of a send, and the send of a receive.
    Instruction other_end() const {
        switch (op) {
            case Op::SX:
                return {Op::RX, stage + 1, micro};
            case Op::RX:
                return {Op::SX, stage - 1, micro};
            case Op::SG:
                return {Op::RG, stage - 1, micro};
            default:
                return {Op::SG, stage + 1, micro};
        }
    }
    std::string text() const {
        return name_of(op) + (" " + std::to_string(stage)) + " " + std::to_string(micro);
    }
    std::string quoted() const { return "'" + text() + "'"; }
};

struct Schedule {
    std::vector<std::vector<Instruction>> lists;  // of each rank
    std::vector<int> owner;                       // the rank of each stage
    int micro_batches = 0;

    int ranks() const { return int(lists.size()); }
    int stages() const { return int(owner.size()); }
    /// The rank at the other end of a message.
    int peer(const Instruction& message) const { return owner[message.other_end().stage]; }
    bool travels(const Instruction& message) const { return peer(message) != owner[message.stage]; }
    /// What a computation reads, as a message that is received, whether it travels or was made on the same rank;
    /// nothing for what reads the batch or the loss.
    std::optional<Instruction> reads(const Instruction& i) const {
        if (i.op == Op::F && i.stage > 0) return Instruction{Op::RX, i.stage, i.micro};
        if ((i.op == Op::B || i.op == Op::I) && i.stage + 1 < stages())
            return Instruction{Op::RG, i.stage, i.micro};
        return {};
    }
    /// What a computation makes, as a message that is sent.
    std::optional<Instruction> makes(const Instruction& i) const {
        if (i.op == Op::F && i.stage + 1 < stages()) return Instruction{Op::SX, i.stage, i.micro};
        if ((i.op == Op::B || i.op == Op::I) && i.stage > 0) return Instruction{Op::SG, i.stage, i.micro};
        return {};
    }
};

namespace detail {

inline Instruction read_instruction(const std::string& item) {
    std::istringstream words(item);
    std::string op, more;
    Instruction i;
    words >> op >> i.stage >> i.micro;
    const std::optional<Op> found = find_named<Op>(op);
    constexpr int most = 1000000;
    if (!words || words >> more || !found || i.stage < 0 || i.micro < 0 || i.stage > most || i.micro > most) {
        std::string shown = item.substr(0, 40);
        std::ranges::replace_if(shown, [](unsigned char c) { return c < ' ' || c > '~'; }, '?');
        throw UsageError(
            "'" + shown +
            "' is no instruction; one is F 0 3: F, B, I, W, SX, RX, SG or RG, stage, micro-batch");
    }
    i.op = *found;
    return i;
}

inline std::string on(int rank) {
    return "rank " + std::to_string(rank);
}

/// Every micro-batch passes every stage forward once, then backward once, on the stage's rank.
inline void check_computations(const Schedule& s) {
    for (int rank = 0; rank < s.ranks(); ++rank) {
        std::map<Instruction, std::size_t> at;
        for (const Instruction& i : s.lists[rank])
            if (!at.emplace(i, at.size()).second)
                throw UsageError(on(rank) + " has " + i.quoted() + " twice");
        for (const auto& [i, place] : at)
            if (s.owner[i.stage] != rank)
                throw UsageError(on(rank) + " has " + i.quoted() + ", but stage " + std::to_string(i.stage) +
                                 " is " + on(s.owner[i.stage]) + "'s");
        for (int stage = 0; stage < s.stages(); ++stage)
            for (int m = 0; s.owner[stage] == rank && m < s.micro_batches; ++m) {
                std::vector<Op> found;
                std::string shown;
                std::vector<std::size_t> places;
                for (const Op op : {Op::F, Op::B, Op::I, Op::W})
                    if (const auto it = at.find({op, stage, m}); it != at.end()) {
                        if (!found.empty()) shown += ' ';
                        shown += name_of(op);
                        found.push_back(op);
                        places.push_back(it->second);
                    }
                const std::string where =
                    on(rank) + ", stage " + std::to_string(stage) + ", micro-batch " + std::to_string(m);
                if (found != std::vector{Op::F, Op::B} && found != std::vector{Op::F, Op::I, Op::W})
                    throw UsageError(where + " has " + (found.empty() ? "nothing" : shown) +
                                     "; F B or F I W is needed");
                if (!std::ranges::is_sorted(places))
                    throw UsageError(where + ": backward stands before forward");
            }
    }
}

/// What travels is made before it is sent, received before it is read, and named in the same order at both ends.
inline void check_messages(const Schedule& s) {
    std::map<std::pair<int, int>, std::array<std::vector<Instruction>, 2>>
        channels;  // from, to: sent, received
    for (int rank = 0; rank < s.ranks(); ++rank) {
        std::set<Instruction> made, received;
        for (const Instruction& i : s.lists[rank]) {
            if (i.computes()) {
                const auto read = s.reads(i), made_here = s.makes(i);
                if (read && s.travels(*read) && !received.contains(*read))
                    throw UsageError(on(rank) + " computes " + i.quoted() + " before it receives " +
                                     read->quoted());
                if (made_here && s.travels(*made_here)) made.insert(*made_here);
            } else if (i.sends()) {
                if (!made.erase(i))
                    throw UsageError(on(rank) + " sends " + i.quoted() + " before it has made it");
                channels[{rank, s.peer(i)}][0].push_back(i);
            } else {
                received.insert(i);
                channels[{s.peer(i), rank}][1].push_back(i.other_end());
            }
        }
        if (!made.empty()) throw UsageError(on(rank) + " never sends " + made.begin()->quoted());
    }
    for (const auto& [channel, ends] : channels) {
        const auto& [sent, expected] = ends;
        const auto [a, b] = std::ranges::mismatch(sent, expected);
        if (a == sent.end() && b == expected.end()) continue;
        throw UsageError("from " + on(channel.first) + " to " + std::to_string(channel.second) +
                         ", message " + std::to_string(a - sent.begin()) + ": " +
                         (a == sent.end() ? "nothing" : a->quoted()) + " is sent, " +
                         (b == expected.end() ? "nothing" : b->quoted()) + " expected");
    }
}

}  // namespace detail

/// Calls run(rank, i) for all instructions, each after what it waits for. Returns how far each rank came.
template <class Run>
std::vector<std::size_t> walk(const Schedule& s, Run run) {
    std::vector<std::size_t> at(s.ranks());
    std::set<Instruction> made;  // as messages that are sent
    const auto ready = [&](const Instruction& i) {
        const auto read = s.reads(i);
        return !i.computes() || !read || made.contains(read->other_end());
    };
    for (bool moved = true; moved;) {
        moved = false;
        for (int rank = 0; rank < s.ranks(); ++rank)
            for (; at[rank] < s.lists[rank].size() && ready(s.lists[rank][at[rank]]); ++at[rank]) {
                const Instruction& i = s.lists[rank][at[rank]];
                run(rank, i);
                if (i.sends()) made.insert(i);
                if (const auto out = s.makes(i); out && !s.travels(*out)) made.insert(*out);
                moved = true;
            }
    }
    return at;
}

/// The schedule of a text, one line a rank. Raises UsageError, one line long, for what would compute something wrong
/// or hang.
inline Schedule read_schedule(const std::string& text) {
    Schedule s;
    std::istringstream lines(text);
    std::map<int, int> owner;
    for (std::string line; std::getline(lines, line);) {
        if (line.find_first_not_of(" \t\r") == line.npos) continue;
        s.lists.emplace_back();
        std::istringstream items(line);
        for (std::string item; std::getline(items, item, ';');) {
            const Instruction i = detail::read_instruction(item);
            s.lists.back().push_back(i);
            if (i.op == Op::F) owner.emplace(i.stage, s.ranks() - 1);
            if (i.computes()) s.micro_batches = std::max(s.micro_batches, i.micro + 1);
        }
    }
    if (owner.empty()) throw UsageError("a list without a forward computes nothing");
    for (const auto& [stage, rank] : owner) {
        if (stage != s.stages()) throw UsageError("nobody computes 'F " + std::to_string(s.stages()) + " 0'");
        s.owner.push_back(rank);
    }
    for (int rank = 0; rank < s.ranks(); ++rank)
        for (const Instruction& i : s.lists[rank]) {
            const int other = i.computes() ? i.stage : i.other_end().stage;
            if (i.stage >= s.stages() || other < 0 || other >= s.stages())
                throw UsageError(detail::on(rank) + " has " + i.quoted() + "; there are stages 0 to " +
                                 std::to_string(s.stages() - 1));
        }
    detail::check_computations(s);
    detail::check_messages(s);
    const std::vector<std::size_t> at = walk(s, [](int, const Instruction&) {});
    std::string stand;
    for (int rank = 0; rank < s.ranks(); ++rank)
        if (at[rank] < s.lists[rank].size())
            stand +=
                (stand.empty() ? "" : ", ") + detail::on(rank) + " at " + s.lists[rank][at[rank]].quoted();
    if (!stand.empty()) throw UsageError("ranks wait for one another for ever: " + stand);
    return s;
}

/// The share of all ranks' time in which they compute nothing, where takes(i) is what a computation takes and messages
/// take no time.
template <class Takes>
double simulated_bubble(const Schedule& s, Takes takes) {
    std::vector<double> free(s.ranks());
    std::map<Instruction, double> there;  // when what is made is
    double busy = 0;
    walk(s, [&](int rank, const Instruction& i) {
        if (!i.computes()) return;
        const auto read = s.reads(i), made = s.makes(i);
        const double start = std::max(free[rank], read ? there[read->other_end()] : 0), took = takes(i);
        free[rank] = start + took, busy += took;
        if (made) there[*made] = free[rank];
    });
    return 1 - busy / (s.ranks() * std::ranges::max(free));
}

}  // namespace fived
