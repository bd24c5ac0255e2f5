// MPI for people: objects that free themselves, errors that are exceptions, sizes that are checked.
//
//     fived::Environment mpi(argc, argv);
//     fived::Communicator world = fived::Communicator::world();
//     world.all_reduce(std::span(values));
#pragma once

#include <mpi.h>

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fived/math/partition.hpp"

namespace fived {

/// Says which call failed, on which communicator, on which rank, and why.
class MpiError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

template <class T>
MPI_Datatype datatype() {
    if constexpr (std::is_same_v<T, float>) return MPI_FLOAT;
    if constexpr (std::is_same_v<T, double>) return MPI_DOUBLE;
    if constexpr (std::is_same_v<T, int>) return MPI_INT;
    if constexpr (std::is_same_v<T, std::uint32_t>) return MPI_UINT32_T;
    if constexpr (std::is_same_v<T, std::int64_t>) return MPI_INT64_T;
    if constexpr (std::is_same_v<T, std::uint64_t>) return MPI_UINT64_T;
    if constexpr (std::is_same_v<T, std::uint8_t> || std::is_same_v<T, std::byte>) return MPI_BYTE;
}

/// Elements that one MPI message carries at most. MPI 3 counts with int; longer buffers travel in pieces of
/// this length. The same on all ranks (tests make it small).
inline std::size_t max_message = std::size_t{1} << 30;

class Communicator;

/// A message or collective under way. Its buffer must live until wait() returns. Destroyed while pending (an
/// exception on the way), it is given up and its buffer must not be used again.
class Request {
  public:
    Request() = default;
    Request(Request&& other) noexcept { *this = std::move(other); }
    Request& operator=(Request&& other) noexcept {
        std::swap(handle_, other.handle_);
        std::swap(owner_, other.owner_);
        std::swap(call_, other.call_);
        std::swap(type_, other.type_);
        std::swap(expected_, other.expected_);
        std::swap(source_, other.source_);
        return *this;
    }
    ~Request() {
        int finalized = 0;
        MPI_Finalized(&finalized);
        if (!pending() || finalized) return;
        if (expected_ >= 0) MPI_Cancel(&handle_);
        if (type_ != MPI_DATATYPE_NULL) MPI_Request_free(&handle_);
    }

    bool pending() const { return handle_ != MPI_REQUEST_NULL; }
    /// Who sent what arrived; -1 before, and where nothing is received.
    int source() const { return source_; }
    /// Blocks until done. Raises MpiError, also for a message of another length than its buffer.
    void wait();
    /// Gives MPI the processor for a moment: it moves messages only inside its calls. True when done.
    bool test();

  private:
    friend class Communicator;
    void finish(int code, const MPI_Status& status);

    MPI_Request handle_ = MPI_REQUEST_NULL;
    const Communicator* owner_ = nullptr;
    const char* call_ = "";
    MPI_Datatype type_ = MPI_DATATYPE_NULL;  // of a point-to-point message; collectives leave it null
    long expected_ = -1;                     // elements to arrive; -1 when nothing is received
    int source_ = -1;
};

/// A group of ranks with its own message space. Collective to make; move-only; freed at the end of its scope.
class Communicator {
  public:
    static Communicator world() { return Communicator(MPI_COMM_WORLD); }

    /// Duplicates `handle`, so that our messages and error handling never meet those of its owner.
    explicit Communicator(MPI_Comm handle, const std::string& name = "") {
        char buffer[MPI_MAX_OBJECT_NAME] = "";
        int length = 0;
        if (handle != MPI_COMM_NULL) MPI_Comm_get_name(handle, buffer, &length);
        MPI_Comm copy = MPI_COMM_NULL;
        const int code = MPI_Comm_dup(handle, &copy);
        take(copy, name.empty() ? buffer : name);
        check(code, "MPI_Comm_dup");
    }
    Communicator(Communicator&& other) noexcept
        : handle_(std::exchange(other.handle_, MPI_COMM_NULL)),
          name_(std::move(other.name_)),
          rank_(other.rank_),
          size_(other.size_) {}
    Communicator& operator=(Communicator&&) = delete;
    ~Communicator() {
        if (handle_ == MPI_COMM_NULL) return;
        int finalized = 0;
        MPI_Finalized(&finalized);
        if (!finalized) MPI_Comm_free(&handle_);
    }
    /// Calls MPI no more: in a fork the communicator is the parent's.
    void abandon() { handle_ = MPI_COMM_NULL; }

    Communicator dup(const std::string& name = "") const {
        return Communicator(handle_, name.empty() ? name_ : name);
    }
    /// Ranks with the same `color` form a new communicator, ordered by `key`.
    Communicator split(int color, int key, const std::string& name) const {
        if (color < 0) fail("MPI_Comm_split", "color " + std::to_string(color) + " is negative");
        MPI_Comm part = MPI_COMM_NULL;
        check(MPI_Comm_split(handle_, color, key, &part), "MPI_Comm_split");
        Communicator result;
        result.take(part, name);
        return result;
    }

    int rank() const { return rank_; }
    int size() const { return size_; }
    const std::string& name() const { return name_; }
    MPI_Comm handle() const { return handle_; }

    template <class T>
    void send(std::span<T> data, int to, int tag = 0) const {
        check_rank("MPI_Send", to);
        pieces(data, [&](auto part) {
            check(MPI_Send(part.data(), count(part), type<T>(), to, tag, handle_), "MPI_Send");
        });
    }
    /// Raises MpiError when another number of elements arrives than `data` holds.
    template <class T>
    void receive(std::span<T> data, int from, int tag = 0) const {
        pieces(data, [&](auto part) { start_receive(part, from, tag, "MPI_Recv").wait(); });
    }
    /// Sends `data` to `partner` and fills `arriving` from it, at the same time; the lengths are equal.
    template <class T>
    void exchange(std::span<T> data, std::span<T> arriving, int partner, int tag = 0) const {
        if (data.size() != arriving.size())
            fail("exchange", std::to_string(data.size()) + " elements to send, room for " +
                                 std::to_string(arriving.size()) + " to receive");
        pieces(data, [&](auto part) {
            Request receiving = start_receive(arriving.first(part.size()), partner, tag);
            send(part, partner, tag);
            receiving.wait();
            arriving = arriving.subspan(part.size());
        });
    }
    template <class T>
    [[nodiscard]] Request start_send(std::span<T> data, int to, int tag = 0) const {
        check_rank("MPI_Isend", to);
        check_count("MPI_Isend", data.size());
        Request request = make("MPI_Isend", type<T>(), -1);
        check(MPI_Isend(data.data(), count(data), type<T>(), to, tag, handle_, &request.handle_),
              "MPI_Isend");
        return request;
    }
    template <class T>
    [[nodiscard]] Request start_receive(std::span<T> data, int from, int tag = 0,
                                        const char* call = "MPI_Irecv") const {
        if (from != MPI_ANY_SOURCE) check_rank(call, from);
        check_count(call, data.size());
        Request request = make(call, type<T>(), static_cast<long>(data.size()));
        check(MPI_Irecv(data.data(), count(data), type<T>(), from, tag, handle_, &request.handle_), call);
        return request;
    }

    void barrier() const { check(MPI_Barrier(handle_), "MPI_Barrier"); }
    /// In place: P -> R. Every rank ends with the sum (or `op`) over the ranks.
    template <class T>
    void all_reduce(std::span<T> data, MPI_Op op = MPI_SUM) const {
        pieces(data, [&](auto part) {
            check(MPI_Allreduce(MPI_IN_PLACE, part.data(), count(part), type<T>(), op, handle_),
                  "MPI_Allreduce");
        });
    }
    template <class T>
        requires std::is_arithmetic_v<T>
    T all_reduce(T value, MPI_Op op = MPI_SUM) const {
        all_reduce(std::span(&value, 1), op);
        return value;
    }
    template <class T>
    [[nodiscard]] Request start_all_reduce(std::span<T> data) const {
        check_count("MPI_Iallreduce", data.size());
        Request request = make("MPI_Iallreduce", MPI_DATATYPE_NULL, -1);
        check(MPI_Iallreduce(MPI_IN_PLACE, data.data(), count(data), type<T>(), MPI_SUM, handle_,
                             &request.handle_),
              "MPI_Iallreduce");
        return request;
    }
    /// Begins P -> the sum, in place, on `root` alone; the other ranks keep their terms.
    template <class T>
    [[nodiscard]] Request start_reduce(std::span<T> data, int root) const {
        check_rank("MPI_Ireduce", root);
        check_count("MPI_Ireduce", data.size());
        Request request = make("MPI_Ireduce", MPI_DATATYPE_NULL, -1);
        const void* terms = rank_ == root ? MPI_IN_PLACE : data.data();
        check(
            MPI_Ireduce(terms, data.data(), count(data), type<T>(), MPI_SUM, root, handle_, &request.handle_),
            "MPI_Ireduce");
        return request;
    }
    /// Begins to fill `data` with what `root` has, in place.
    template <class T>
    [[nodiscard]] Request start_broadcast(std::span<T> data, int root) const {
        check_rank("MPI_Ibcast", root);
        check_count("MPI_Ibcast", data.size());
        Request request = make("MPI_Ibcast", MPI_DATATYPE_NULL, -1);
        check(MPI_Ibcast(data.data(), count(data), type<T>(), root, handle_, &request.handle_), "MPI_Ibcast");
        return request;
    }
    /// In place: S -> R. Rank r brings piece r of P pieces; every rank ends with all of them.
    template <class T>
    void all_gather(std::span<T> data) const {
        if (data.size() > max_message) {
            for (int root = 0; root < size_; ++root) broadcast(piece(data, size_, root), root);
            return;
        }
        std::vector<int> counts, offsets;
        for (int r = 0; r < size_; ++r) {
            counts.push_back(count(piece(data, size_, r)));
            offsets.push_back(static_cast<int>(cut(data.size(), size_, r)));
        }
        check(MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data.data(), counts.data(), offsets.data(),
                             type<T>(), handle_),
              "MPI_Allgatherv");
    }
    /// Sends rank q the elements `to[q]` of `data` and puts those from rank q at `from[q]` of `arriving`. Raises MpiError
    /// for pieces beyond their buffer, or beyond 2^31 - 1 elements, where MPI 3 ends.
    template <class T>
    void all_to_all(std::span<const T> data, std::span<const Range> to, std::span<T> arriving,
                    std::span<const Range> from) const {
        const Lengths sent = lengths(data.size(), to), received = lengths(arriving.size(), from);
        check(MPI_Alltoallv(data.data(), sent.counts.data(), sent.offsets.data(), type<T>(), arriving.data(),
                            received.counts.data(), received.offsets.data(), type<T>(), handle_),
              "MPI_Alltoallv");
    }
    /// In place: every rank ends with what `root` has.
    template <class T>
    void broadcast(std::span<T> data, int root = 0) const {
        check_rank("MPI_Bcast", root);
        pieces(data, [&](auto part) {
            check(MPI_Bcast(part.data(), count(part), type<T>(), root, handle_), "MPI_Bcast");
        });
    }

    /// In place, a text of any length.
    void broadcast(std::string& text, int root = 0) const {
        std::uint64_t length = text.size();
        broadcast(std::span(&length, 1), root);
        text.resize(length);
        broadcast(std::as_writable_bytes(std::span(text)), root);
    }

    /// Raises MpiError unless `code` is MPI_SUCCESS.
    void check(int code, const char* call) const {
        if (code == MPI_SUCCESS) return;
        char text[MPI_MAX_ERROR_STRING] = "";
        int length = 0;
        MPI_Error_string(code, text, &length);
        fail(call, std::string(text, length));
    }
    [[noreturn]] void fail(const std::string& call, const std::string& why) const {
        throw MpiError(call + " on '" + name_ + "', rank " + std::to_string(rank_) + " of " +
                       std::to_string(size_) + ": " + why);
    }
    void check_rank(const char* call, int rank) const {
        if (rank < 0 || rank >= size_)
            fail(call, "no rank " + std::to_string(rank) + "; there are 0 to " + std::to_string(size_ - 1));
    }

  private:
    Communicator() = default;

    template <class T>
    static MPI_Datatype type() {
        return datatype<std::remove_const_t<T>>();
    }
    template <class T>
    static int count(std::span<T> data) {
        return static_cast<int>(data.size());
    }
    /// Calls use(part) for the parts of at most max_message elements; once for an empty buffer.
    template <class T, class Use>
    static void pieces(std::span<T> data, Use use) {
        do {
            const std::size_t n = std::min(data.size(), max_message);
            use(data.first(n));
            data = data.subspan(n);
        } while (!data.empty());
    }
    void check_count(const char* call, std::size_t n) const {
        if (n > max_message)
            fail(call,
                 std::to_string(n) + " elements in one message; at most " + std::to_string(max_message));
    }
    struct Lengths {
        std::vector<int> counts, offsets;
    };
    Lengths lengths(std::size_t n, std::span<const Range> ranges) const {
        if (ranges.size() != std::size_t(size_))
            fail("MPI_Alltoallv",
                 std::to_string(ranges.size()) + " pieces for " + std::to_string(size_) + " ranks");
        Lengths found;
        for (const Range& range : ranges) {
            if (range.end() > std::min(n, std::size_t{INT_MAX}))
                fail("MPI_Alltoallv", "a piece ends at element " + std::to_string(range.end()) + " of " +
                                          std::to_string(n) + "; at most " + std::to_string(INT_MAX) +
                                          " are possible");
            found.counts.push_back(static_cast<int>(range.length));
            found.offsets.push_back(static_cast<int>(range.begin));
        }
        return found;
    }
    Request make(const char* call, MPI_Datatype type, long expected) const {
        Request request;
        request.owner_ = this;
        request.call_ = call;
        request.type_ = type;
        request.expected_ = expected;
        return request;
    }
    void take(MPI_Comm handle, const std::string& name) {
        handle_ = handle;
        name_ = name;
        if (handle == MPI_COMM_NULL) return;
        MPI_Comm_set_errhandler(handle, MPI_ERRORS_RETURN);
        MPI_Comm_set_name(handle, name.c_str());
        MPI_Comm_rank(handle, &rank_);
        MPI_Comm_size(handle, &size_);
    }

    MPI_Comm handle_ = MPI_COMM_NULL;
    std::string name_;
    int rank_ = 0, size_ = 1;
};

inline void Request::wait() {
    if (!pending()) return;
    MPI_Status status;
    const int code = MPI_Wait(&handle_, &status);
    finish(code, status);
}

inline bool Request::test() {
    if (!pending()) return true;
    int done = 0;
    MPI_Status status;
    const int code = MPI_Test(&handle_, &done, &status);
    if (done || code != MPI_SUCCESS) finish(code, status);
    return done;
}

inline void Request::finish(int code, const MPI_Status& status) {
    int kind = MPI_SUCCESS;
    if (code != MPI_SUCCESS) MPI_Error_class(code, &kind);
    if (kind != MPI_ERR_TRUNCATE) owner_->check(code, call_);
    if (expected_ < 0) return;
    source_ = status.MPI_SOURCE;
    int arrived = 0;
    MPI_Get_count(&status, type_, &arrived);
    if (kind == MPI_ERR_TRUNCATE || arrived != expected_)
        owner_->fail(call_, (arrived == expected_ ? "more than " : "") + std::to_string(arrived) +
                                " elements arrived from rank " + std::to_string(status.MPI_SOURCE) + ", " +
                                std::to_string(expected_) + " expected");
}

}  // namespace fived
