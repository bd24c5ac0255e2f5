// What the ranks exchange around a step of the optimizer: small strategies of one thing.
//
//               gradients                         the optimizer changes   weights afterwards
//     plain     reduce-scatter, all-gather        everything              are equal anyway
//     ZeRO-1    reduce-scatter                    piece r of n            all-gather
//     top-k     all-gather of the k largest       everything              are equal anyway
//
// The two halves of an all-reduce, with the optimizer after them or between them: ZeRO-1 sends the same
// bytes, and a rank holds the n-th part of the optimizer's state (Rajbhandari et al., arXiv:1910.02054).
// Top-k sends the k numbers that are largest; what it does not send it adds to the next gradient (error
// feedback: Stich et al., arXiv:1809.07599).
//
// When: Buckets sends during the backward pass, Ring and TopK after it. Another strategy is a class derived from Exchange
// and a line in make_exchange().
//
// Cost, bytes a rank sends: plain and ZeRO-1 2 (n-1)/n a byte of gradient; top-k (n-1) k (4 + bytes of a
// number).
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "fived/mpi/collectives.hpp"
#include "fived/named.hpp"

namespace fived {

/// By MPI's calls, in buckets that leave during backward; or by our own ring, whose messages are counted, after it.
enum class Reduction { overlapped, ring };
constexpr auto names(Reduction) {
    return std::array{"overlapped", "ring"};
}

struct Strategy {
    bool zero = false;                // ZeRO-1: rank r steps with piece r alone
    std::optional<double> keep = {};  // top-k: the share of all gradients that a rank sends, in (0, 1]
    bool feedback = true;             // what top-k leaves out is added to the next gradient
    Reduction reduction = Reduction::overlapped;
    std::size_t bucket_bytes = 1u << 20;  // gradients that travel together; at least one number
};

/// What one strategy does. `gradients` is the flat array in which backward leaves them, from the left.
template <class T>
class Exchange {
  public:
    Exchange(const Communicator& comm, std::span<T> gradients, const Strategy& how)
        : comm_(comm), gradients_(gradients), how_(how) {}
    virtual ~Exchange() = default;

    /// The first `finished` gradients of this rank are final.
    virtual void advance(std::size_t finished) { static_cast<void>(finished); }
    /// All are final; returns when the owned ones are sums over the ranks.
    virtual void finish() = 0;
    /// Of a flat array, what this rank steps with.
    std::span<T> owned(std::span<T> flat) const {
        return how_.zero ? piece(flat, comm_.size(), comm_.rank()) : flat;
    }
    /// Every rank's owned part of `flat` -> all ranks.
    void gather(std::span<T> flat) {
        if (how_.zero) all_gather(flat);
    }
    /// A number that belongs to the owned parts -> its sum over all parts.
    double total(double owned) const { return how_.zero ? comm_.all_reduce(owned) : owned; }

    /// Since it was last set to 0. The ring's messages are counted; what MPI's collectives send cannot be
    /// seen from outside, and there it is the ring's formula.
    std::size_t bytes_sent = 0;

  protected:
    template <class U>
    void all_gather(std::span<U> data) {
        if (how_.reduction == Reduction::ring) {
            bytes_sent += ring_all_gather(comm_, data);
        } else {
            comm_.all_gather(data);
            bytes_sent += ring_all_gather_bytes(data.size(), sizeof(U), comm_.size(), comm_.rank());
        }
    }

    const Communicator& comm_;
    const std::span<T> gradients_;
    const Strategy how_;
};

/// Plain and ZeRO-1 by MPI, in buckets that leave while backward computes the rest.
template <class T>
class Buckets final : public Exchange<T> {
    using Base = Exchange<T>;
    using Base::comm_, Base::gradients_, Base::how_, Base::bytes_sent;

  public:
    Buckets(const Communicator& comm, std::span<T> gradients, const Strategy& how)
        : Base(comm, gradients, how), bucket_(std::max<std::size_t>(1, how.bucket_bytes / sizeof(T))) {}

    /// Starts every bucket that is full, and lets MPI move those under way: it does so only inside its calls,
    /// hence MPI_Test between the matrix products.
    void advance(std::size_t finished) override {
        const bool all = finished == gradients_.size();
        while (started_ + bucket_ <= finished || (all && started_ < finished)) {
            const std::size_t end = std::min(started_ + bucket_, finished);
            start(started_, end);
            started_ = end;
        }
        for (Request& request : pending_) request.test();
    }
    void finish() override {
        for (Request& request : pending_) request.wait();
        pending_.clear();
        started_ = 0;
        const std::size_t n = gradients_.size();
        const int P = comm_.size(), r = comm_.rank();
        bytes_sent += how_.zero ? ring_reduce_scatter_bytes(n, sizeof(T), P, r)
                                : ring_all_reduce_bytes(n, sizeof(T), P, r);
    }

  private:
    /// Gradients [begin, end) -> their sum, on all ranks or, with ZeRO-1, on the rank that owns them; a bucket
    /// may reach over a border between owners.
    void start(std::size_t begin, std::size_t end) {
        if (!how_.zero) {
            pending_.push_back(comm_.start_all_reduce(gradients_.subspan(begin, end - begin)));
            return;
        }
        const std::size_t n = gradients_.size(), P = comm_.size();
        for (std::size_t owner = 0; owner < P; ++owner) {
            const std::size_t from = std::max(begin, cut(n, P, owner)),
                              to = std::min(end, cut(n, P, owner + 1));
            if (from < to)
                pending_.push_back(comm_.start_reduce(gradients_.subspan(from, to - from), int(owner)));
        }
    }

    std::size_t bucket_, started_ = 0;
    std::vector<Request> pending_;
};

/// Plain and ZeRO-1 by our ring, after backward.
template <class T>
class Ring final : public Exchange<T> {
    using Base = Exchange<T>;

  public:
    using Base::Base;
    void finish() override {
        Base::bytes_sent += ring_reduce_scatter(Base::comm_, Base::gradients_);
        if (!Base::how_.zero) Base::all_gather(Base::gradients_);
    }
};

/// How many of n gradients top-k sends.
inline std::size_t kept(std::size_t n, double keep) {
    return std::size_t(std::ceil(keep * double(n)));
}

/// Every rank sends the k largest of its gradients as indices and values. Which they are is known only when
/// all are there, so nothing overlaps.
template <class T>
class TopK final : public Exchange<T> {
    using Base = Exchange<T>;
    using Base::comm_, Base::gradients_, Base::how_;

  public:
    /// Raises std::invalid_argument for a share that is not in (0, 1] or gradients beyond 2^32.
    TopK(const Communicator& comm, std::span<T> gradients, const Strategy& how)
        : Base(comm, gradients, how), k_(kept(gradients.size(), checked(*how.keep, gradients.size()))) {
        memory_.resize(gradients.size());
        sizes_.resize(gradients.size());
        indices_.resize(k_ * comm.size());
        values_.resize(k_ * comm.size());
    }

    void finish() override {
        for (std::size_t i = 0; i < gradients_.size(); ++i)
            memory_[i] = (how_.feedback ? memory_[i] : 0) + gradients_[i];
        take_largest();
        Base::all_gather(std::span(indices_));
        Base::all_gather(std::span(values_));
        std::ranges::fill(gradients_, T(0));
        for (std::size_t i = 0; i < indices_.size(); ++i) gradients_[indices_[i]] += values_[i];
    }

  private:
    /// Moves the k largest numbers of the memory into this rank's piece of the lists; among equal ones the
    /// first.
    void take_largest() {
        // What is no number counts as the largest: every rank must see it, as it would without compression.
        const auto size = [](T value) {
            return std::isnan(value) ? std::numeric_limits<T>::infinity() : std::abs(value);
        };
        std::ranges::transform(memory_, sizes_.begin(), size);
        const auto last = sizes_.begin() + (k_ - 1);
        std::ranges::nth_element(sizes_, last, std::greater());
        const T limit = *last;
        std::size_t equal = k_ - std::count_if(sizes_.begin(), last, [&](T s) { return s > limit; });
        std::size_t place = comm_.rank() * k_;
        for (std::size_t i = 0, found = 0; found < k_; ++i) {
            const T s = size(memory_[i]);
            if (s < limit || (s == limit && equal == 0)) continue;
            if (s == limit) --equal;
            indices_[place] = std::uint32_t(i);
            values_[place++] = std::exchange(memory_[i], T(0));
            ++found;
        }
    }
    static double checked(double keep, std::size_t n) {
        if (!(keep > 0 && keep <= 1))
            throw std::invalid_argument("top-k keeps a share of " + std::to_string(keep) +
                                        "; it must be above 0 and at most 1");
        if (n > std::uint64_t{1} << 32)
            throw std::invalid_argument("top-k numbers gradients with 32 bits; given " + std::to_string(n));
        return keep;
    }

    std::size_t k_;
    std::vector<T> memory_, sizes_, values_;
    std::vector<std::uint32_t> indices_;
};

template <class T>
std::unique_ptr<Exchange<T>> make_exchange(const Communicator& comm, std::span<T> gradients,
                                           const Strategy& how) {
    if (how.keep) return std::make_unique<TopK<T>>(comm, gradients, how);
    if (how.reduction == Reduction::ring) return std::make_unique<Ring<T>>(comm, gradients, how);
    return std::make_unique<Buckets<T>>(comm, gradients, how);
}

/// Bytes that rank r of P sends in a step, by formula: n gradients of `element` bytes.
inline std::size_t exchange_bytes(const Strategy& how, std::size_t n, std::size_t element, int P, int r) {
    if (!how.keep) return ring_all_reduce_bytes(n, element, P, r);
    return (P - 1) * kept(n, *how.keep) * (sizeof(std::uint32_t) + element) +
           (how.zero ? ring_all_gather_bytes(n, element, P, r) : 0);
}

}  // namespace fived
