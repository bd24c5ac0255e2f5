#include "pp_mpi.hpp"

#include <cmath>

namespace fived {

template <class T>
Pipeline<T>::Pipeline(const std::vector<int>& sizes, std::uint64_t seed, const Communicator& comm,
                      Schedule schedule)
    : comm_(comm), schedule_(std::move(schedule)), stages_(sizes, seed, mine(), buffers_) {
    if (schedule_.ranks() != comm.size())
        throw std::invalid_argument("the schedule is for " + std::to_string(schedule_.ranks()) +
                                    " ranks; there are " + std::to_string(comm.size()));
    if (schedule_.stages() >= int(sizes.size()))
        throw std::invalid_argument(std::to_string(sizes.size() - 1) + " layers are too few for " +
                                    std::to_string(schedule_.stages()) + " stages");
}

template <class T>
std::vector<bool> Pipeline<T>::mine() const {
    std::vector<bool> mine;
    for (const int owner : schedule_.owner) mine.push_back(owner == comm_.rank());
    return mine;
}

template <class T>
double Pipeline<T>::loss_and_gradients(MatrixView<const T> x_BI, std::span<const std::uint8_t> y_B) {
    const std::size_t M = schedule_.micro_batches;
    stages_.check_samples(x_BI, y_B);
    if (x_BI.rows < M)
        throw std::invalid_argument("a batch of " + std::to_string(x_BI.rows) + " cannot be cut into " +
                                    std::to_string(M) + " micro-batches");
    x_BI_ = x_BI, y_B_ = y_B;
    buffers_.resize((x_BI.rows + M - 1) / M * stages_.widest());
    stages_.clear_bias_gradients();
    written_.assign(schedule_.stages(), false);
    events_.clear();
    loss_ = 0, bytes_sent_ = 0, blocked_seconds_ = 0, clock_ = Timer();
    for (const Instruction& i : schedule_.lists[comm_.rank()]) {
        if (i.computes())
            compute(i);
        else if (i.sends())
            send(i);
        else
            receive(i);
    }
    for (Moving& message : leaving_) {
        wait(message);
        buffers_.give(std::move(message.buffer));
    }
    leaving_.clear();
    const Timer waiting;
    loss_ = comm_.all_reduce(loss_);
    blocked_seconds_ += waiting.seconds();
    return loss_;
}

template <class T>
void Pipeline<T>::compute(const Instruction& i) {
    Buffer in = read(i), out;
    const double start = clock_.seconds();
    if (i.op == Op::F) out = forward(i, std::move(in));
    if (i.op == Op::B || i.op == Op::I) out = backward(i, std::move(in));
    if (i.op == Op::B || i.op == Op::W) weights_backward(i);
    events_.push_back({i, start, clock_.seconds()});
    const auto message = schedule_.makes(i);
    if (!message) return;
    if (schedule_.travels(*message))
        made_[*message] = std::move(out);
    else
        arriving_[message->other_end()].buffer = std::move(out);
}

template <class T>
typename Pipeline<T>::Buffer Pipeline<T>::forward(const Instruction& i, Buffer x) {
    const auto [begin, n] = rows(i.micro);
    Kept<T>& kept = kept_[{i.stage, i.micro}];
    kept.input = std::move(x);
    kept.x_BI = i.stage == 0 ? x_BI_.row_block(begin, n)
                             : MatrixView<const T>(kept.input.get(), n, stages_.width(i.stage));
    Buffer out = stages_.forward(i.stage, kept, [this] { progress(); });
    // Each loss is divided by the samples of the whole batch: micro-batches may differ in size.
    // The last stage has no output.
    if (!out) loss_ += stages_.loss(kept, y_B_.subspan(begin, n), 1 / double(y_B_.size()));
    return out;
}

template <class T>
typename Pipeline<T>::Buffer Pipeline<T>::backward(const Instruction& i, Buffer dy) {
    return stages_.backward_input(i.stage, kept_.at({i.stage, i.micro}), std::move(dy),
                                  [this] { progress(); });
}

template <class T>
void Pipeline<T>::weights_backward(const Instruction& i) {
    auto kept = kept_.extract({i.stage, i.micro});
    stages_.backward_weights(i.stage, std::move(kept.mapped()), written_[i.stage], [this] { progress(); });
    written_[i.stage] = true;
}

/// What a computation reads, once it is there.
template <class T>
typename Pipeline<T>::Buffer Pipeline<T>::read(const Instruction& i) {
    const auto message = schedule_.reads(i);
    if (!message) return {};
    auto found = arriving_.extract(*message);
    wait(found.mapped());
    return std::move(found.mapped().buffer);
}

template <class T>
void Pipeline<T>::send(const Instruction& i) {
    Moving& moving = leaving_.emplace_back(std::move(made_.extract(i).mapped()));
    for (const std::span<T> piece : pieces(i, moving.buffer)) {
        moving.pieces.push_back(comm_.start_send(piece, schedule_.peer(i)));
        bytes_sent_ += piece.size_bytes();
    }
}

template <class T>
void Pipeline<T>::receive(const Instruction& i) {
    Moving& moving = arriving_[i];
    moving.buffer = buffers_.take();
    for (const std::span<T> piece : pieces(i, moving.buffer))
        moving.pieces.push_back(comm_.start_receive(piece, schedule_.peer(i)));
}

template <class T>
void Pipeline<T>::wait(Moving& moving) {
    const Timer waiting;
    for (Request& piece : moving.pieces) piece.wait();
    blocked_seconds_ += waiting.seconds();
}

template <class T>
bool Pipeline<T>::test(Moving& moving) {
    bool done = true;
    for (Request& piece : moving.pieces) done &= piece.test();
    return done;
}

/// MPI moves messages only inside its calls: without these, what is under way would wait for the next wait.
template <class T>
void Pipeline<T>::progress() {
    for (auto& [receive, moving] : arriving_) test(moving);
    std::erase_if(leaving_, [&](Moving& moving) {
        if (!test(moving)) return false;
        buffers_.give(std::move(moving.buffer));
        return true;
    });
}

/// First row and number of rows.
template <class T>
std::pair<std::size_t, std::size_t> Pipeline<T>::rows(int micro) const {
    const std::size_t begin = cut(y_B_.size(), schedule_.micro_batches, micro);
    return {begin, cut(y_B_.size(), schedule_.micro_batches, micro + 1) - begin};
}

/// The numbers of a message: rows x width where the two stages meet.
template <class T>
std::vector<std::span<T>> Pipeline<T>::pieces(const Instruction& i, const Buffer& buffer) const {
    const std::size_t width = stages_.width(std::max(i.stage, i.other_end().stage));
    const std::span<T> whole(buffer.get(), rows(i.micro).second * width);
    const std::size_t parts = (whole.size_bytes() + message_piece - 1) / message_piece;
    std::vector<std::span<T>> pieces;
    for (std::size_t part = 0; part < parts; ++part) pieces.push_back(piece(whole, parts, part));
    return pieces;
}

template <class T>
double Pipeline<T>::gradient_norm() {
    return std::sqrt(comm_.all_reduce(sum_of_squares<T>(gradients())));
}

template <class T>
std::size_t Pipeline<T>::bytes_by_formula(std::size_t batch) const {
    std::size_t widths = 0;
    for (int s = 1; s < schedule_.stages(); ++s) {
        const int before = schedule_.owner[s - 1], after = schedule_.owner[s];
        if (before != after && (before == comm_.rank() || after == comm_.rank())) widths += stages_.width(s);
    }
    return batch * widths * sizeof(T);
}

template class Pipeline<float>;
template class Pipeline<double>;

}  // namespace fived
