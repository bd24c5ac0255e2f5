// Ring attention by MPI: a rank keeps its queries; the keys and values of all ranks come past it.
//
//     out = softmax(q k' / sqrt K) v, each rank with s = S / P positions of the sequence
//
//     step 0: q0 k0   q1 k1   q2 k2   q3 k3     while q_r meets the keys of one rank, they are on the way to
//     step 1: q0 k3   q1 k0   q2 k1   q3 k2     the next, and those of another arrive (arXiv:2310.01889);
//     step 2: q0 k2   q1 k3   q2 k0   q3 k1     backward, the gradients of k and v follow one step behind
//     step 3: q0 k1   q1 k2   q2 k3   q3 k0
//
//     causal, contiguous:  0 0 0 0|1 1 1 1|2 2 2 2|3 3 3 3     rank 0 sees few keys, rank 3 all: others wait
//     causal, zigzag:      0 0|1 1|2 2|3 3|3 3|2 2|1 1|0 0     every rank sees as many
//
// Bytes a rank sends, with b = 2 B G K times the bytes of a number, those of k and v of one position: forward
// (P-1)/P S b, backward as much again and as much for the gradients. Memory: s, never S.
//
// B batch  H query heads  G key-value heads  S sequence  s this rank's part of it  K width of a head
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "fived/lesson/record.hpp"
#include "fived/mpi/mpi.hpp"
#include "fived/named.hpp"
#include "sp_tiles.hpp"

namespace fived {

enum class Order { contiguous, zigzag };
constexpr auto names(Order) {
    return std::array{"contiguous", "zigzag"};
}

/// Neighbouring positions of the sequence.
struct Chunk {
    std::size_t begin, length;
};

/// The positions of rank r of P, in the order in which it holds them: piece r of P, or in zigzag the pieces r
/// and 2P-1-r of 2P. Pieces differ by one position at most.
std::vector<Chunk> chunks(std::size_t sequence, int P, int r, Order order);
/// How many positions that are.
std::size_t length(const std::vector<Chunk>& chunks);
/// Pairs of a query of rank r and a key that it sees: the work of one head of one sample.
std::size_t pairs(std::size_t sequence, int P, int r, Order order, bool causal);

struct AttentionShape {
    std::size_t batch = 1, heads = 1, kv_heads = 1, sequence = 1, head_width = 1;
};

/// Attention over a sequence that is split over the ranks of `comm`; serial when comm is null. Arrays are
/// flat and contiguous: q, out, dout, dq [B, H, s, K]; k, v, dk, dv [B, G, s, K]; logsumexp [B, H, s].
template <class T>
class RingAttention {
  public:
    /// `comm` must outlive this. Throws std::invalid_argument where kv_heads does not divide heads or a size
    /// is 0.
    RingAttention(const Communicator* comm, const AttentionShape& shape, Order order, bool causal);

    /// Throws std::invalid_argument, before any message, for arrays of another length.
    void forward(std::span<const T> q, std::span<const T> k, std::span<const T> v, std::span<T> out,
                 std::span<T> logsumexp);
    /// From the gradient of out, and what forward was given and gave.
    void backward(std::span<const T> dout, std::span<const T> q, std::span<const T> k, std::span<const T> v,
                  std::span<const T> out, std::span<const T> logsumexp, std::span<T> dq, std::span<T> dk,
                  std::span<T> dv);

    const AttentionShape& shape() const { return shape_; }
    /// This rank's positions.
    std::size_t local() const { return length(chunks_[rank_]); }
    /// Bytes this rank sent, and its seconds blocked in MPI, in the last forward or backward.
    std::size_t bytes_sent() const { return bytes_sent_; }
    double blocked_seconds() const { return blocked_seconds_; }
    /// What they have to be.
    std::size_t forward_bytes() const { return kv_bytes(source(P_ - 1)); }
    std::size_t backward_bytes() const { return kv_bytes(source(P_ - 1)) + kv_bytes(rank_); }

  private:
    struct KeysValues {
        std::span<const T> k, v;
    };
    struct Room {
        std::vector<T> k, v;
        void resize(std::size_t n) { k.resize(n), v.resize(n); }
        KeysValues first(std::size_t n) const { return {std::span(k).first(n), std::span(v).first(n)}; }
    };

    /// The rank whose keys are here at a step.
    int source(int step) const { return (rank_ + P_ - step) % P_; }
    /// Keys and values of all ranks but one.
    std::size_t kv_bytes(int but) const {
        return 2 * shape_.batch * shape_.kv_heads * (shape_.sequence - length(chunks_[but])) *
               shape_.head_width * sizeof(T);
    }
    std::size_t kv_numbers(int r) const {
        return shape_.batch * shape_.kv_heads * length(chunks_[r]) * shape_.head_width;
    }
    template <class Use>
    void each_pair(int source, Use use) const;
    enum class Passing { keys_values, gradients };  // two pairs of messages at a time
    void pass(const KeysValues& data, Room& room, int arriving, Passing what);
    void wait();
    void progress();
    void check(const char* name, std::size_t given, std::size_t heads, std::size_t width) const;

    const Communicator* comm_;
    AttentionShape shape_;
    bool causal_;
    int rank_ = 0, P_ = 1;
    std::vector<std::vector<Chunk>> chunks_;  // of every rank
    TiledAttention<T> tiles_;
    Room keys_values_[2], gradients_[2], arriving_;
    std::vector<T> sum_, delta_;
    std::vector<Request> moving_;
    std::size_t bytes_sent_ = 0;
    double blocked_seconds_ = 0;
};

}  // namespace fived
