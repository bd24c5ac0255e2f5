// Runs one rank's list of a schedule, whatever its stages compute.
//
//     F 0 3    y = forward(F 0 3, x)             x arrived by RX, or was made on this rank; y leaves by SX
//     B 1 3    dx = backward_input(B 1 3, dy), then backward_weights(B 1 3); I and W are its two halves
//
// A message is started where it stands in the list, and a computation waits for what it reads. Two ranks match messages
// by order: a rank receives in the order in which its peer sends.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fived/lesson/record.hpp"
#include "fived/math/schedule.hpp"
#include "fived/mpi/mpi.hpp"
#include "pp_buffers.hpp"

namespace fived {

/// Bytes of a piece of a message: so few that MPI takes them at once. Longer ones wait until the receiver says where to
/// put them, and then for the sender to be inside MPI again, some tens of kilobytes at a time, and here both are busy.
inline std::size_t message_piece = 4000;

/// A computation and when it ran, in seconds since run() was called.
struct Event {
    Instruction instruction;
    double start, end;
};

template <class T>
class ScheduleRunner {
  public:
    using Buffer = typename Buffers<T>::Buffer;

    /// `comm` must outlive this. Throws std::invalid_argument where the schedule is for another number of ranks.
    ScheduleRunner(const Communicator& comm, Schedule schedule)
        : comm_(comm), schedule_(std::move(schedule)) {
        if (schedule_.ranks() != comm.size())
            throw std::invalid_argument("the schedule is for " + std::to_string(schedule_.ranks()) +
                                        " ranks; there are " + std::to_string(comm.size()));
    }
    ScheduleRunner(const ScheduleRunner&) = delete;

    const Schedule& schedule() const { return schedule_; }
    /// Of every stage, whether it is on this rank.
    std::vector<bool> mine() const {
        std::vector<bool> mine;
        for (const int owner : schedule_.owner) mine.push_back(owner == comm_.rank());
        return mine;
    }

    /// All of this rank's list. Stages has
    ///     Buffer forward(Instruction, Buffer x), Buffer backward_input(Instruction, Buffer dy)
    ///     void backward_weights(Instruction)
    ///     std::size_t numbers(Instruction)        of a message
    /// and calls progress() between its matrix products. Collective.
    template <class Stages>
    void run(Stages& stages, Buffers<T>& buffers) {
        buffers_ = &buffers;
        events_.clear();
        bytes_sent_ = 0, blocked_seconds_ = 0, clock_ = Timer();
        for (const Instruction& i : schedule_.lists[comm_.rank()]) {
            if (i.computes())
                compute(stages, i);
            else if (i.sends())
                send(i, stages.numbers(i));
            else
                receive(i, stages.numbers(i));
        }
        for (Moving& message : leaving_) {
            wait(message);
            buffers.give(std::move(message.buffer));
        }
        leaving_.clear();
    }
    /// MPI moves messages only inside its calls: without these, what is under way would wait for the next wait.
    void progress() {
        for (auto& [receive, moving] : arriving_) test(moving);
        std::erase_if(leaving_, [&](Moving& moving) {
            if (!test(moving)) return false;
            buffers_->give(std::move(moving.buffer));
            return true;
        });
    }

    /// Bytes this rank sent, and its seconds blocked in MPI, in the last run().
    std::size_t bytes_sent() const { return bytes_sent_; }
    double blocked_seconds() const { return blocked_seconds_; }
    std::span<const Event> events() const { return events_; }

  private:
    struct Moving {
        Buffer buffer;
        std::vector<Request> pieces;  // none for what stays on the rank
    };

    template <class Stages>
    void compute(Stages& stages, const Instruction& i) {
        Buffer in = read(i), out;
        const double start = clock_.seconds();
        if (i.op == Op::F) out = stages.forward(i, std::move(in));
        if (i.op == Op::B || i.op == Op::I) out = stages.backward_input(i, std::move(in));
        if (i.op == Op::B || i.op == Op::W) stages.backward_weights(i);
        events_.push_back({i, start, clock_.seconds()});
        const auto message = schedule_.makes(i);
        if (!message) return;
        if (schedule_.travels(*message))
            made_[*message] = std::move(out);
        else
            arriving_[message->other_end()].buffer = std::move(out);
    }
    /// What a computation reads, once it is there.
    Buffer read(const Instruction& i) {
        const auto message = schedule_.reads(i);
        if (!message) return {};
        auto found = arriving_.extract(*message);
        wait(found.mapped());
        return std::move(found.mapped().buffer);
    }
    void send(const Instruction& i, std::size_t numbers) {
        Moving& moving = leaving_.emplace_back(std::move(made_.extract(i).mapped()));
        for (const std::span<T> piece : pieces(moving.buffer, numbers)) {
            moving.pieces.push_back(comm_.start_send(piece, schedule_.peer(i)));
            bytes_sent_ += piece.size_bytes();
        }
    }
    void receive(const Instruction& i, std::size_t numbers) {
        Moving& moving = arriving_[i];
        moving.buffer = buffers_->take();
        for (const std::span<T> piece : pieces(moving.buffer, numbers))
            moving.pieces.push_back(comm_.start_receive(piece, schedule_.peer(i)));
    }
    void wait(Moving& moving) {
        const Timer waiting;
        for (Request& piece : moving.pieces) piece.wait();
        blocked_seconds_ += waiting.seconds();
    }
    static bool test(Moving& moving) {
        bool done = true;
        for (Request& piece : moving.pieces) done &= piece.test();
        return done;
    }
    static std::vector<std::span<T>> pieces(const Buffer& buffer, std::size_t numbers) {
        const std::span<T> whole(buffer.get(), numbers);
        const std::size_t parts = (whole.size_bytes() + message_piece - 1) / message_piece;
        std::vector<std::span<T>> pieces;
        for (std::size_t part = 0; part < parts; ++part) pieces.push_back(piece(whole, parts, part));
        return pieces;
    }

    const Communicator& comm_;
    Schedule schedule_;
    Buffers<T>* buffers_ = nullptr;           // while run() runs
    std::map<Instruction, Moving> arriving_;  // by the receive
    std::map<Instruction, Buffer> made_;      // by the send
    std::vector<Moving> leaving_;
    std::vector<Event> events_;
    Timer clock_;
    double blocked_seconds_ = 0;
    std::size_t bytes_sent_ = 0;
};

}  // namespace fived
