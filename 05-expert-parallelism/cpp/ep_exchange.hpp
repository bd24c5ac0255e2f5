// Which rows of a mixture go to which rank, and the messages that carry them there and back.
//
//     rank 0 has tokens a b and experts 0 1, rank 1 tokens c d and experts 2 3; K = 2
//
//               rows by expert    after the first, second all-to-all     experts, and the same way back
//     rank 0    a0 b1 | a2 b3     a0 d0         a0 d0 | b1 c1            ... weighted and summed: y_a y_b
//     rank 1    d0 c1 | c2 d3     a2 c2         a2 c2 | b3 d3            ... weighted and summed: y_c y_d
//
// Every rank first says how many rows it has for each expert: as many travel as there are, none is dropped. There is one
// MPI_Alltoallv for the first expert of all ranks, one for the second, ...: so rows land sorted by expert.
//
// E experts, e of this rank  R rows of this rank's tokens  r rows of this rank's experts  D width  P ranks
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "fived/lesson/record.hpp"
#include "fived/math/partition.hpp"
#include "fived/mpi/mpi.hpp"

namespace fived {

/// The experts of rank r of P.
inline Range experts_of(std::size_t E, int P, int r) {
    return shard_of(E, P, r);
}

class Exchange {
  public:
    /// first_E: of the rows sorted by expert the first of each expert, and at the end their number. comm: the ranks with the
    /// experts; null where one rank has all. It must outlive this. Collective.
    void plan(const Communicator* comm, std::span<const std::size_t> first_E, std::size_t D) {
        comm_ = comm, D_ = D, R_ = first_E.back();
        forget();
        const int P = comm ? comm->size() : 1;
        const std::size_t E = first_E.size() - 1, e = experts_of(E, P, comm ? comm->rank() : 0).length;
        std::vector<std::int64_t> counts_E(E), counts_Pe(P * e);
        for (std::size_t i = 0; i < E; ++i) counts_E[i] = std::int64_t(first_E[i + 1] - first_E[i]);
        tell(counts_E, counts_Pe, e);
        const std::size_t rounds = experts_of(E, P, 0).length;
        leave_.assign(rounds, std::vector<Range>(P)), arrive_ = leave_;
        arrivals_.assign(e, {});
        std::size_t place = 0;
        for (std::size_t i = 0; i < rounds; ++i)
            for (int q = 0; q < P; ++q) {
                const Range theirs = experts_of(E, P, q);
                const std::size_t expert = theirs.begin + i;
                if (i < theirs.length)
                    leave_[i][q] = {first_E[expert] * D, (first_E[expert + 1] - first_E[expert]) * D};
                if (i >= e) continue;
                const std::size_t count = std::size_t(counts_Pe[q * e + i]);
                if (q == 0) arrivals_[i].begin = place;
                arrive_[i][q] = {place * D, count * D};
                arrivals_[i].length += count, place += count;
            }
    }
    /// Rows that came for this rank's expert i.
    const Range& rows(std::size_t i) const { return arrivals_[i]; }
    /// r: rows of all of them.
    std::size_t arrived() const { return arrivals_.empty() ? 0 : arrivals_.back().end(); }
    /// Rows that go to other ranks' experts, and that come from other ranks.
    std::size_t rows_moved() const {
        std::size_t numbers = 0;
        for (const auto* of_rounds : {&leave_, &arrive_})
            for (const std::vector<Range>& of_ranks : *of_rounds) numbers += to_others(of_ranks);
        return numbers / D_;
    }

    /// Sends rows_RD, sorted by expert, to the ranks of these; on one rank swaps the two. Collective.
    template <class T>
    void to_experts(std::vector<T>& rows_RD, std::vector<T>& arrived_rD) {
        arrived_rD.resize(arrived() * D_);
        exchange(rows_RD, leave_, arrived_rD, arrive_);
    }
    /// The way back.
    template <class T>
    void to_tokens(std::vector<T>& rows_rD, std::vector<T>& returned_RD) {
        returned_RD.resize(R_ * D_);
        exchange(rows_rD, arrive_, returned_RD, leave_);
    }

    /// What this rank has sent since plan() or forget().
    std::size_t bytes_sent() const { return bytes_sent_; }
    double seconds() const { return seconds_; }
    void forget() { bytes_sent_ = 0, seconds_ = 0; }

  private:
    /// Row q of counts_Pe: how many rows rank q has for each of this rank's experts.
    void tell(std::span<const std::int64_t> counts_E, std::span<std::int64_t> counts_Pe, std::size_t e) {
        if (!comm_) return void(std::ranges::copy(counts_E, counts_Pe.begin()));
        std::vector<Range> to, from;
        for (int q = 0; q < comm_->size(); ++q)
            to.push_back(experts_of(counts_E.size(), comm_->size(), q)), from.push_back({q * e, e});
        const Timer timer;
        comm_->all_to_all(counts_E, to, counts_Pe, from);
        bytes_sent_ += (counts_E.size() - e) * sizeof(std::int64_t);
        seconds_ += timer.seconds();
    }
    template <class T>
    void exchange(std::vector<T>& rows, const std::vector<std::vector<Range>>& to, std::vector<T>& arriving,
                  const std::vector<std::vector<Range>>& from) {
        if (!comm_) return std::swap(rows, arriving);
        const Timer timer;
        for (std::size_t i = 0; i < to.size(); ++i) {
            comm_->all_to_all(std::span<const T>(rows), to[i], std::span(arriving), from[i]);
            bytes_sent_ += to_others(to[i]) * sizeof(T);
        }
        seconds_ += timer.seconds();
    }
    std::size_t to_others(const std::vector<Range>& of_ranks) const {
        std::size_t numbers = 0;
        for (int q = 0; comm_ && q < comm_->size(); ++q)
            if (q != comm_->rank()) numbers += of_ranks[q].length;
        return numbers;
    }

    const Communicator* comm_ = nullptr;
    std::size_t D_ = 1, R_ = 0;
    std::vector<Range> arrivals_;                     // the rows of each of this rank's experts
    std::vector<std::vector<Range>> leave_, arrive_;  // numbers, of each all-to-all for each rank
    std::size_t bytes_sent_ = 0;
    double seconds_ = 0;
};

}  // namespace fived
