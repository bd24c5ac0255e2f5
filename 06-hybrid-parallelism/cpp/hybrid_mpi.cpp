#include "hybrid_mpi.hpp"

#include <stdexcept>
#include <string>

namespace fived {

namespace {

/// Throws std::invalid_argument for sizes that nothing can be divided by.
const ModelShape& above_zero(const ModelShape& shape) {
    for (const std::size_t size : {shape.layers, shape.width, shape.heads, shape.vocabulary})
        if (size < 1)
            throw std::invalid_argument("a model needs layers, width, heads and words of at least 1");
    return shape;
}

}  // namespace

template <class T>
Hybrid<T>::Hybrid(const ModelShape& shape, const Mesh& mesh, Schedule schedule, std::size_t sequence,
                  Order order, std::uint64_t seed)
    : shape_(above_zero(shape)),
      mesh_(mesh),
      chunks_(chunks(sequence, mesh.size(Axis::sp), mesh.at(Axis::sp), order)),
      sequence_(sequence),
      runner_(mesh.along(Axis::pp).comm(), std::move(schedule)),
      workspace_{{shape, mesh, sequence, order}, {mesh.along(Axis::ep)}} {
    check();
    const std::vector<bool> mine = runner_.mine();
    const int stages = int(mine.size());
    if (mine.front() || mine.back()) embedding_.emplace(parameters_, shape, mesh, mine.front());
    for (int s = 0; s < stages; ++s)
        if (mine[s])
            stages_.try_emplace(s, parameters_, shape, mesh, workspace_, shard_of(shape.layers, stages, s),
                                embedding_ ? &*embedding_ : nullptr);
    const std::vector<int>& owner = this->schedule().owner;
    if (owner.front() != owner.back()) {
        holders_.emplace(mesh.along(Axis::pp).comm().split(!embedding_, mesh.at(Axis::pp), "tied"));
        if (embedding_) parameters_.tie(embedding_->id());
    }
    parameters_.make(shape.layers, seed);
}

template <class T>
void Hybrid<T>::check() const {
    const std::size_t tp = mesh_.size(Axis::tp), stages = schedule().stages();
    if (shape_.width % shape_.heads || shape_.heads % tp || shape_.vocabulary < tp)
        throw std::invalid_argument("width " + std::to_string(shape_.width) + " and " +
                                    std::to_string(shape_.heads) + " heads cannot be split over " +
                                    std::to_string(tp) + " ranks along tp");
    if (shape_.layers < stages)
        throw std::invalid_argument(std::to_string(shape_.layers) + " layers are too few for " +
                                    std::to_string(stages) + " stages");
    const std::size_t E = shape_.experts, K = shape_.experts_per_token, ep = mesh_.size(Axis::ep);
    if (E && (K < 1 || K > E || E < ep))
        throw std::invalid_argument("of " + std::to_string(E) + " experts a token cannot choose " +
                                    std::to_string(K) + ", or " + std::to_string(ep) +
                                    " ranks along ep each have one");
    if (sequence_ < 1 || sequence_ > shape_.longest)
        throw std::invalid_argument("a sequence of " + std::to_string(sequence_) + " tokens; 1 to " +
                                    std::to_string(shape_.longest) + " are possible");
}

template <class T>
double Hybrid<T>::loss_and_gradients(MatrixView<const std::int64_t> tokens_BS,
                                     MatrixView<const std::int64_t> targets_BS) {
    cut_batch(tokens_BS, targets_BS);
    std::int64_t count = 0;
    for (const MicroBatch& batch : micro_)
        count += std::ranges::count_if(batch.targets, [](std::int64_t target) { return target != padding; });
    Line &tokens = mesh_.along(token_axes), &pp = mesh_.along(Axis::pp);
    scale_ = 1 / double(tokens.all_reduce(count));
    loss_ = 0, workspace_.rows.moved = 0;
    std::ranges::fill(gradients(), T(0));
    runner_.run(*this, buffers_);
    rows_moved_ = workspace_.rows.moved;
    pp.book(pp.size() * std::int64_t(runner_.bytes_sent()), runner_.blocked_seconds());
    parameters_.sum_gradients(mesh_, holders_ ? &*holders_ : nullptr);
    const T of_stages = pp.all_reduce(T(loss_));  // the last stage has it, the others bring 0
    return double(tokens.all_reduce(of_stages)) * scale_;
}

/// This rank's positions of all samples, in the schedule's micro-batches, which differ by one sample at most.
template <class T>
void Hybrid<T>::cut_batch(MatrixView<const std::int64_t> tokens_BS,
                          MatrixView<const std::int64_t> targets_BS) {
    const std::size_t B = tokens_BS.rows, M = schedule().micro_batches;
    if (tokens_BS.columns != sequence_ || targets_BS.columns != sequence_ || targets_BS.rows != B || B < M)
        throw std::invalid_argument("the model takes samples of " + std::to_string(sequence_) +
                                    " tokens, at least one per micro-batch; given are " + std::to_string(B) +
                                    " of " + std::to_string(tokens_BS.columns) + " for " + std::to_string(M));
    const auto known = [&](std::int64_t token) {
        if (token < 0 || token >= std::int64_t(shape_.vocabulary))
            throw std::invalid_argument("token " + std::to_string(token) + " is outside of a vocabulary of " +
                                        std::to_string(shape_.vocabulary));
        return token;
    };
    micro_.assign(M, {});
    std::size_t largest = 0;
    for (std::size_t m = 0; m < M; ++m) {
        MicroBatch& batch = micro_[m];
        const std::size_t begin = cut(B, M, m), end = cut(B, M, m + 1);
        batch.samples = end - begin;
        for (std::size_t b = begin; b < end; ++b)
            for (const Chunk& chunk : chunks_)
                for (std::size_t i = chunk.begin; i < chunk.begin + chunk.length; ++i) {
                    batch.tokens.push_back(known(tokens_BS(b, i)));
                    const std::int64_t target = targets_BS(b, i);
                    batch.targets.push_back(target == padding ? padding : known(target));
                    batch.positions.push_back(std::int64_t(i));
                }
        largest = std::max(largest, batch.size());
    }
    buffers_.resize(largest * shape_.width);
}

template <class T>
typename Hybrid<T>::Buffer Hybrid<T>::forward(const Instruction& i, Buffer x) {
    if (!x) x = buffers_.take();
    loss_ += stages_.at(i.stage).forward(i.micro, micro_[i.micro], view(x, i.micro), T(scale_),
                                         [this] { runner_.progress(); });
    if (i.stage + 1 < schedule().stages()) return x;
    buffers_.give(std::move(x));
    return {};
}

template <class T>
typename Hybrid<T>::Buffer Hybrid<T>::backward_input(const Instruction& i, Buffer dy) {
    if (!dy) dy = buffers_.take();
    stages_.at(i.stage).backward_input(i.micro, micro_[i.micro], view(dy, i.micro),
                                       [this] { runner_.progress(); });
    if (i.stage > 0) return dy;
    buffers_.give(std::move(dy));
    return {};
}

template <class T>
void Hybrid<T>::backward_weights(const Instruction& i) {
    stages_.at(i.stage).backward_weights(i.micro, micro_[i.micro].size(), [this] { runner_.progress(); });
}

template class Hybrid<float>;
template class Hybrid<double>;

}  // namespace fived
