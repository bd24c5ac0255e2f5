// Collectives written from point-to-point messages, to read and to measure beside MPI's own.
//
// Each works in place, along the ranks of one communicator (the axis), and returns the bytes that this rank
// really sent. n = elements of the buffer, b = bytes of one, P = ranks.
//
// R: every rank holds the same. P: every rank holds a term of the sum. S: rank r holds piece r of P pieces.
#pragma once

#include <bit>
#include <memory>
#include <span>
#include <vector>

#include "fived/mpi/mpi.hpp"

namespace fived {

/// Bytes of a message of the ring: a message is added while the next is under way; shorter ones overlap
/// better, but each costs a handshake.
inline std::size_t ring_message = std::size_t{4} << 20;

/// One turn of the ring: P-1 steps, in each of which every rank passes one piece to the next rank. Rank r
/// first sends piece `first`; what it receives it adds to its own (`add`) or keeps, and passes on in the next
/// step. Pieces travel as messages of about `ring_message` bytes, so a rank receives, adds and sends at the
/// same time.
template <class T>
std::size_t ring_turn(const Communicator& comm, std::span<T> data, int first, bool add) {
    const int P = comm.size(), next = (comm.rank() + 1) % P, previous = (comm.rank() + P - 1) % P;
    const std::size_t largest = (data.size() + P - 1) / P;
    const std::size_t messages = std::max<std::size_t>(1, largest * sizeof(T) / ring_message);
    const std::size_t total = (P - 1) * messages;
    // Message k of the turn belongs to step k / messages.
    const auto sent = [&](std::size_t k) {
        return piece(piece(data, P, (first + 2 * P - k / messages) % P), messages, k % messages);
    };
    const auto received = [&](std::size_t k) { return sent(k + messages); };

    const std::size_t half = add ? largest / messages + 1 : 0;  // two landings: one fills while one is added
    const auto scratch = std::make_unique_for_overwrite<T[]>(2 * half);
    const auto landing = [&](std::size_t k) {
        return add ? std::span(scratch.get() + k % 2 * half, received(k).size()) : received(k);
    };
    std::size_t bytes = 0;
    std::vector<Request> sends(total);
    Request arriving[2];
    if (total > 0) arriving[0] = comm.start_receive(landing(0), previous);
    for (std::size_t k = 0; k < total; ++k) {
        sends[k] = comm.start_send(sent(k), next);
        bytes += sent(k).size_bytes();
        if (k + 1 < total) arriving[(k + 1) % 2] = comm.start_receive(landing(k + 1), previous);
        arriving[k % 2].wait();
        if (!add) continue;
        T* mine = received(k).data();
        const T* theirs = landing(k).data();
        for (std::size_t i = 0; i < received(k).size(); ++i) mine[i] += theirs[i];
    }
    for (Request& send : sends) send.wait();
    return bytes;
}

/// P -> S: rank r's piece r (the rest is left half-summed) ends as the sum over the ranks.
/// Adjoint: ring_all_gather. Sends (n - n_r) b, n_r = elements of piece r: about n b (P-1)/P.
template <class T>
std::size_t ring_reduce_scatter(const Communicator& comm, std::span<T> data) {
    return ring_turn(comm, data, comm.rank() + comm.size() - 1, true);
}

/// S -> R: every rank ends with all pieces. Adjoint: ring_reduce_scatter. Sends (n - n_{r+1}) b.
template <class T>
std::size_t ring_all_gather(const Communicator& comm, std::span<T> data) {
    return ring_turn(comm, data, comm.rank(), false);
}

/// P -> R, by 2 (P-1) messages of n/P elements: nothing is sent twice, so it is the fastest for long buffers.
/// Adjoint: itself. Sends (2n - n_r - n_{r+1}) b; over all ranks 2 (P-1) n b, which nothing can undercut.
template <class T>
std::size_t ring_all_reduce(const Communicator& comm, std::span<T> data) {
    return ring_reduce_scatter(comm, data) + ring_all_gather(comm, data);
}

/// The bytes that rank r sends in them, by formula: all pieces but one. n elements of `element` bytes.
inline std::size_t ring_reduce_scatter_bytes(std::size_t n, std::size_t element, int P, int r) {
    return (n - cut(n, P, r + 1) + cut(n, P, r)) * element;
}
inline std::size_t ring_all_gather_bytes(std::size_t n, std::size_t element, int P, int r) {
    return ring_reduce_scatter_bytes(n, element, P, (r + 1) % P);
}
inline std::size_t ring_all_reduce_bytes(std::size_t n, std::size_t element, int P, int r) {
    return ring_reduce_scatter_bytes(n, element, P, r) + ring_all_gather_bytes(n, element, P, r);
}

/// P -> R, in log2(P) exchanges of the whole buffer with the rank whose number differs in one bit: the fewest
/// messages, so the fastest for short buffers. When P is no power of two, the ranks beyond it hand their term
/// to a partner first and get the sum last. Adjoint: itself. Sends n b log2(P) (P a power of two).
template <class T>
std::size_t recursive_doubling_all_reduce(const Communicator& comm, std::span<T> data) {
    const int rank = comm.rank(), P = comm.size(), power = static_cast<int>(std::bit_floor(unsigned(P)));
    std::vector<T> theirs(data.size());
    const auto add = [&] {
        for (std::size_t i = 0; i < data.size(); ++i) data[i] += theirs[i];
    };
    if (rank >= power) {
        comm.send(data, rank - power);
        comm.receive(data, rank - power);
        return data.size_bytes();
    }
    std::size_t bytes = 0;
    const bool has_partner = rank + power < P;
    if (has_partner) {
        comm.receive(std::span(theirs), rank + power);
        add();
    }
    for (int bit = 1; bit < power; bit *= 2) {
        comm.exchange(data, std::span(theirs), rank ^ bit);
        add();
        bytes += data.size_bytes();
    }
    if (has_partner) {
        comm.send(data, rank + power);
        bytes += data.size_bytes();
    }
    return bytes;
}

/// Root's buffer -> R: in round i the 2^i ranks that have it each send it to one that has not. Adjoint: a sum
/// onto the root. log2(P) rounds; a rank sends n b for each child it has, the root log2(P) n b.
template <class T>
std::size_t tree_broadcast(const Communicator& comm, std::span<T> data, int root = 0) {
    comm.check_rank("tree_broadcast", root);
    const int P = comm.size(), place = (comm.rank() - root + P) % P;  // the tree is drawn with the root at 0
    std::size_t bytes = 0;
    for (int have = 1; have < P; have *= 2) {
        if (place < have && place + have < P) {
            comm.send(data, (place + have + root) % P);
            bytes += data.size_bytes();
        } else if (place >= have && place < 2 * have) {
            comm.receive(data, (place - have + root) % P);
        }
    }
    return bytes;
}

}  // namespace fived
