#include "sp_mpi.hpp"

#include <stdexcept>
#include <string>

namespace fived {

std::vector<Chunk> chunks(std::size_t sequence, int P, int r, Order order) {
    const auto chunk = [&](int pieces, int i) {
        const std::size_t begin = cut(sequence, pieces, i);
        return Chunk{begin, cut(sequence, pieces, i + 1) - begin};
    };
    if (order == Order::contiguous) return {chunk(P, r)};
    return {chunk(2 * P, r), chunk(2 * P, 2 * P - 1 - r)};
}

std::size_t length(const std::vector<Chunk>& chunks) {
    std::size_t positions = 0;
    for (const Chunk& chunk : chunks) positions += chunk.length;
    return positions;
}

std::size_t pairs(std::size_t sequence, int P, int r, Order order, bool causal) {
    std::size_t total = 0;
    for (const auto& [begin, n] : chunks(sequence, P, r, order))
        total += causal ? n * begin + n * (n + 1) / 2 : n * sequence;
    return total;
}

namespace {

/// Positions [begin, begin + n) of one head of one sample.
template <class T>
MatrixView<T> rows(std::span<T> data, std::size_t head, std::size_t positions, std::size_t width,
                   std::size_t begin, std::size_t n) {
    return {data.data() + (head * positions + begin) * width, n, width};
}

template <class T>
void add(std::span<T> sum, std::span<const T> term) {
    T* __restrict s = sum.data();
    const T* __restrict a = term.data();
#pragma omp simd
    for (std::size_t i = 0; i < sum.size(); ++i) s[i] += a[i];
}

}  // namespace

template <class T>
RingAttention<T>::RingAttention(const Communicator* comm, const AttentionShape& shape, Order order,
                                bool causal)
    : comm_(comm), shape_(shape), causal_(causal), tiles_(shape.head_width) {
    const auto& [B, H, G, S, K] = shape;
    if (std::min({B, H, G, S, K}) < 1 || H % G)
        throw std::invalid_argument(
            "attention needs positive sizes and kv_heads that divide heads; given batch " +
            std::to_string(B) + ", heads " + std::to_string(H) + ", kv_heads " + std::to_string(G) +
            ", sequence " + std::to_string(S) + ", head_width " + std::to_string(K));
    if (comm_) rank_ = comm_->rank(), P_ = comm_->size();
    std::size_t largest = 0;
    for (int r = 0; r < P_; ++r) {
        chunks_.push_back(chunks(S, P_, r, order));
        largest = std::max(largest, kv_numbers(r));
    }
    if (P_ > 1)
        for (Room* room : {keys_values_, keys_values_ + 1, gradients_, gradients_ + 1, &arriving_})
            room->resize(largest);
    sum_.resize(B * H * local());
    delta_.resize(B * H * local());
}

/// Calls use(query head, first query, queries, key head, first key, keys, diagonal) for this rank's chunks of
/// queries and the chunks of keys of `source` that they see. Chunks are whole or diagonal: no pair is masked
/// outside the diagonal's tiles.
template <class T>
template <class Use>
void RingAttention<T>::each_pair(int source, Use use) const {
    const std::size_t group = shape_.heads / shape_.kv_heads;
    for (std::size_t head = 0; head < shape_.batch * shape_.heads; ++head) {
        std::size_t query = 0;
        for (const Chunk& mine : chunks_[rank_]) {
            std::size_t key = 0;
            for (const Chunk& theirs : chunks_[source]) {
                const bool seen = !causal_ || theirs.begin <= mine.begin;
                if (seen && mine.length > 0 && theirs.length > 0)
                    use(head, query, mine.length, head / group, key, theirs.length,
                        causal_ && theirs.begin == mine.begin);
                key += theirs.length;
            }
            query += mine.length;
        }
    }
}

template <class T>
void RingAttention<T>::forward(std::span<const T> q, std::span<const T> k, std::span<const T> v,
                               std::span<T> out, std::span<T> logsumexp) {
    const std::size_t s = local(), H = shape_.heads, G = shape_.kv_heads, K = shape_.head_width;
    check("q", q.size(), H, K), check("k", k.size(), G, K), check("v", v.size(), G, K);
    check("out", out.size(), H, K), check("logsumexp", logsumexp.size(), H, 1);
    bytes_sent_ = 0, blocked_seconds_ = 0;
    std::ranges::fill(out, T(0));
    std::ranges::fill(logsumexp, -std::numeric_limits<T>::infinity());
    std::ranges::fill(sum_, T(0));
    KeysValues held{k, v};
    for (int step = 0; step < P_; ++step) {
        const bool more = step + 1 < P_;
        if (more) pass(held, keys_values_[step % 2], source(step + 1), Passing::keys_values);
        const std::size_t theirs = length(chunks_[source(step)]);
        each_pair(source(step), [&](std::size_t head, std::size_t i, std::size_t n, std::size_t kv,
                                    std::size_t j, std::size_t m, bool diagonal) {
            tiles_.forward(rows(q, head, s, K, i, n), rows(held.k, kv, theirs, K, j, m),
                           rows(held.v, kv, theirs, K, j, m), diagonal, rows(out, head, s, K, i, n),
                           logsumexp.subspan(head * s + i, n), std::span(sum_).subspan(head * s + i, n),
                           [&] { progress(); });
        });
        wait();
        if (more) held = keys_values_[step % 2].first(kv_numbers(source(step + 1)));
    }
    tiles_.finish({out.data(), sum_.size(), K}, logsumexp, sum_);
}

template <class T>
void RingAttention<T>::backward(std::span<const T> dout, std::span<const T> q, std::span<const T> k,
                                std::span<const T> v, std::span<const T> out, std::span<const T> logsumexp,
                                std::span<T> dq, std::span<T> dk, std::span<T> dv) {
    const std::size_t s = local(), H = shape_.heads, G = shape_.kv_heads, K = shape_.head_width;
    check("dout", dout.size(), H, K), check("q", q.size(), H, K), check("k", k.size(), G, K);
    check("v", v.size(), G, K), check("out", out.size(), H, K), check("logsumexp", logsumexp.size(), H, 1);
    check("dq", dq.size(), H, K), check("dk", dk.size(), G, K), check("dv", dv.size(), G, K);
    bytes_sent_ = 0, blocked_seconds_ = 0;
    for (const std::span<T> gradient : {dq, dk, dv}) std::ranges::fill(gradient, T(0));
    for (std::size_t i = 0; i < delta_.size(); ++i) {
        delta_[i] = 0;
        for (std::size_t x = i * K; x < (i + 1) * K; ++x) delta_[i] += dout[x] * out[x];
    }
    KeysValues held{k, v};
    for (int step = 0; step < P_; ++step) {
        const bool more = step + 1 < P_;
        const int from = source(step);
        const std::size_t theirs = length(chunks_[from]), n_kv = kv_numbers(from);
        if (more) pass(held, keys_values_[step % 2], source(step + 1), Passing::keys_values);
        // What the ranks before have added to the gradients of these keys; the first to see them is the next
        // rank.
        if (step > 1)
            pass(gradients_[(step - 1) % 2].first(kv_numbers(source(step - 1))), arriving_, from,
                 Passing::gradients);
        const std::span<T> dk_here = step == 0 ? dk : std::span(gradients_[step % 2].k).first(n_kv),
                           dv_here = step == 0 ? dv : std::span(gradients_[step % 2].v).first(n_kv);
        std::ranges::fill(dk_here, T(0));
        std::ranges::fill(dv_here, T(0));
        each_pair(from, [&](std::size_t head, std::size_t i, std::size_t n, std::size_t kv, std::size_t j,
                            std::size_t m, bool diagonal) {
            tiles_.backward(rows(q, head, s, K, i, n), rows(held.k, kv, theirs, K, j, m),
                            rows(held.v, kv, theirs, K, j, m), diagonal, rows(dout, head, s, K, i, n),
                            logsumexp.subspan(head * s + i, n), std::span(delta_).subspan(head * s + i, n),
                            rows(dq, head, s, K, i, n), rows(dk_here, kv, theirs, K, j, m),
                            rows(dv_here, kv, theirs, K, j, m), [&] { progress(); });
        });
        wait();
        if (step > 1) add<T>(dk_here, arriving_.first(n_kv).k), add<T>(dv_here, arriving_.first(n_kv).v);
        if (more) held = keys_values_[step % 2].first(kv_numbers(source(step + 1)));
    }
    if (P_ == 1) return;
    pass(gradients_[(P_ - 1) % 2].first(kv_numbers(source(P_ - 1))), arriving_, rank_, Passing::gradients);
    wait();
    add<T>(dk, arriving_.first(dk.size()).k), add<T>(dv, arriving_.first(dv.size()).v);
}

/// Starts sending `data` to the next rank and receiving what belongs to rank `arriving` from the previous.
template <class T>
void RingAttention<T>::pass(const KeysValues& data, Room& room, int arriving, Passing what) {
    const std::size_t n = kv_numbers(arriving);
    const int previous = source(1), next = source(P_ - 1), tag = 2 * int(what);  // k's; v's is the next
    moving_.push_back(comm_->start_receive(std::span(room.k).first(n), previous, tag));
    moving_.push_back(comm_->start_receive(std::span(room.v).first(n), previous, tag + 1));
    moving_.push_back(comm_->start_send(data.k, next, tag));
    moving_.push_back(comm_->start_send(data.v, next, tag + 1));
    bytes_sent_ += data.k.size_bytes() + data.v.size_bytes();
}

template <class T>
void RingAttention<T>::wait() {
    const Timer timer;
    for (Request& request : moving_) request.wait();
    moving_.clear();
    blocked_seconds_ += timer.seconds();
}

/// MPI moves messages only inside its calls: hence one after every tile.
template <class T>
void RingAttention<T>::progress() {
    for (Request& request : moving_) request.test();
}

template <class T>
void RingAttention<T>::check(const char* name, std::size_t given, std::size_t heads,
                             std::size_t width) const {
    const std::size_t needed = shape_.batch * heads * local() * width;
    if (given != needed)
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(given) + " numbers; " +
                                    std::to_string(needed) + " are this rank's part");
}

template class RingAttention<float>;
template class RingAttention<double>;

}  // namespace fived
