#include "backend.hpp"

#include <functional>

namespace fived {

using c10d::OpType;
using Byte = std::byte;

namespace {

const char* name_of(OpType op) {
    switch (op) {
        case OpType::BROADCAST:
            return "broadcast";
        case OpType::ALLREDUCE:
            return "all_reduce";
        case OpType::REDUCE:
            return "reduce";
        case OpType::ALLGATHER:
        case OpType::_ALLGATHER_BASE:
            return "all_gather";
        case OpType::GATHER:
            return "gather";
        case OpType::SCATTER:
            return "scatter";
        case OpType::REDUCE_SCATTER:
        case OpType::_REDUCE_SCATTER_BASE:
            return "reduce_scatter";
        case OpType::ALLTOALL:
            return "all_to_all";
        case OpType::BARRIER:
            return "barrier";
        default:
            return "message";
    }
}

[[noreturn]] void refuse(const std::string& why) {
    throw std::invalid_argument(why);
}

/// One message space for each group; the name makes the members' calls meet, whatever else is being made.
Communicator members(const std::string& name, const std::vector<int>& ranks) {
    MPI_Group world = MPI_GROUP_NULL, group = MPI_GROUP_NULL;
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    MPI_Group_incl(world, int(ranks.size()), ranks.data(), &group);
    const int tag = int(std::hash<std::string>()(name) % 32768);
    MPI_Comm_create_group(MPI_COMM_WORLD, group, tag, &comm);
    MPI_Group_free(&group);
    MPI_Group_free(&world);
    if (comm == MPI_COMM_NULL) refuse("MPI_Comm_create_group failed for group '" + name + "'");
    Communicator ours(comm, name);
    MPI_Comm_free(&comm);
    return ours;
}

/// MPI_Finalize begins by deleting the attributes of MPI_COMM_SELF (MPI 3.1, section 8.7.1), while MPI still works: the
/// last moment to stop asking it for messages. Groups may be destroyed before, after, or never.
void end_with_mpi() {
    static std::once_flag once;
    std::call_once(once, [] {
        int key = MPI_KEYVAL_INVALID;
        const auto deleted = [](MPI_Comm, int, void*, void*) {
            Engine::get().end();
            return MPI_SUCCESS;
        };
        MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, deleted, &key, nullptr);
        MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr);
        MPI_Comm_free_keyval(&key);
    });
}

}  // namespace

bool MpiWork::isCompleted() {
    if (!done_) Engine::get().poll();
    return done_;
}

bool MpiWork::wait(std::chrono::milliseconds timeout) {
    const auto end = std::chrono::steady_clock::now() + timeout;
    Engine::get().wait([&] {
        if (!done_ && timeout != kNoTimeout && std::chrono::steady_clock::now() > end)
            throw std::runtime_error("Work.wait: not done within " + std::to_string(timeout.count()) + " ms");
        return done_.load();
    });
    if (exception_) std::rethrow_exception(exception_);
    return true;
}

c10::intrusive_ptr<c10::ivalue::Future> MpiWork::getFuture() {
    const std::lock_guard lock(mutex_);
    if (!future_) {
        future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
        if (completed_ && exception_)
            future_->setError(exception_);
        else if (completed_)
            future_->markCompleted(c10::IValue(outputs_));
    }
    return future_;
}

/// Called without the engine's lock: whoever waits on the future may call anything.
void MpiWork::done(std::exception_ptr error) {
    finish(error);
    done_ = true;
    std::unique_lock lock(mutex_);
    const auto future = future_;
    lock.unlock();
    if (!future || future->completed()) return;
    if (error)
        future->setError(error);
    else
        future->markCompleted(c10::IValue(outputs_));
}

MpiBackend::MpiBackend(int rank, int size, const std::string& name, std::vector<int> ranks,
                       std::chrono::milliseconds timeout)
    : Backend(rank, size), name_(name), ranks_(std::move(ranks)), timeout_(timeout) {
    int running = 0, finalized = 0, level = 0, world_rank = 0, world_size = 0;
    MPI_Initialized(&running);
    if (!running) refuse("the backend 'fived' needs MPI; import mpi4py.MPI first, under mpirun");
    MPI_Finalized(&finalized);
    if (finalized) refuse("MPI has ended; it cannot start again");
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_MULTIPLE) refuse("MPI was started without support for several threads");
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    if (ranks_.empty())
        for (int r = 0; r < size; ++r) ranks_.push_back(r);
    if (int(ranks_.size()) != size || ranks_[rank] != world_rank || size > world_size)
        refuse("rank " + std::to_string(rank) + " of " + std::to_string(size) + " of group '" + name +
               "' is not rank " + std::to_string(world_rank) + " of " + std::to_string(world_size) +
               " of MPI; start all ranks with one mpirun");
    comm_.emplace(members(name_, ranks_));
    MPI_Comm host = MPI_COMM_NULL;
    int local = 0;
    comm_->check(MPI_Comm_split_type(comm_->handle(), MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &host),
                 "MPI_Comm_split_type");
    MPI_Comm_size(host, &local);
    MPI_Comm_free(&host);
    if (!comm_->all_reduce(int(local == size), MPI_MIN))
        refuse("the ranks of group '" + name +
               "' are on several hosts; the backend 'fived' talks inside one: use gloo");
    memory_ = std::make_unique<HostMemory>(*comm_);
    Engine::get().expect_ranks(size);
    Engine::get().add(this);
    end_with_mpi();
}

MpiBackend::~MpiBackend() {
    Engine::get().remove(this);
    const auto error = std::make_exception_ptr(std::runtime_error("group '" + name_ + "' was destroyed"));
    for (Task& task : collectives_) task.work->done(error);
    for (Task& task : messages_) task.work->done(error);
}

void MpiBackend::end() {
    ended_ = true;
    broken_ = "group '" + name_ + "': MPI has ended";
    for (Task& task : messages_) task.request.reset();
}

std::string MpiBackend::show(const Call& call) const {
    static const char* reductions[] = {"",       " (avg)", " (product)", " (min)",
                                       " (max)", " (and)", " (or)",      " (xor)"};
    std::string text = name_of(OpType(call.operation & 0xff));
    text += reductions[std::min<std::uint32_t>(call.operation >> 8, 7)];
    if (call.type != 0xff)
        text += " of " + std::to_string(call.elements) + " " + c10::toString(c10::ScalarType(call.type));
    if (call.root) text += ", root " + std::to_string(call.root - 1);
    return text + " (call " + std::to_string(call.number) + ")";
}

void MpiBackend::give_up(Task& task, const std::string& why) {
    broken_ = std::string(name_of(task.work->retrieveOpType())) + " in group '" + name_ + "', rank " +
              std::to_string(rank_) + " of " + std::to_string(size_) + ": " + why;
    throw std::runtime_error(broken_);
}

/// One step of the first task in line; true when it is done.
bool MpiBackend::step(Task& task) {
    if (ended_) throw std::runtime_error(broken_);
    while (!task.messages.empty() || task.request) {
        if (!task.request) {
            task.request.emplace(task.messages.front()());
            task.messages.pop_front();
        }
        if (!task.request->test()) {
            if ((++polls_ & 0xff) == 0 && Clock::now() > task.deadline)
                throw std::runtime_error(task.what + " in group '" + name_ + "': no match within " +
                                         std::to_string(timeout_.count() / 1000.0) + " s");
            return false;
        }
        task.work->source_ = task.request->source();
        task.request.reset();
    }
    while (!task.stages.empty() || task.rounds) {
        if (!task.rounds) {
            task.rounds.emplace(task.stages.front()());
            task.stages.pop_front();
        }
        const auto mismatch = [&](int r, const Call& theirs) {
            give_up(task, "this rank calls " + show(task.rounds->call()) + "; rank " + std::to_string(r) +
                              " calls " + show(theirs));
        };
        if (!memory_->advance(*task.rounds, mismatch)) {
            if ((++polls_ & 0xff) == 0 && Clock::now() > task.deadline) {
                std::string late;
                for (int r = 0; r < size_; ++r)
                    if (!memory_->is_here(r)) late += (late.empty() ? "" : ", ") + std::to_string(r);
                give_up(task, show(task.rounds->call()) + " timed out after " +
                                  std::to_string(timeout_.count()) + " ms; it waits for rank(s) " + late);
            }
            return false;
        }
        task.rounds.reset();
    }
    return true;
}

bool MpiBackend::advance(std::vector<std::function<void()>>& afterwards) {
    bool moved = false;
    const auto try_step = [&](Task& task) {
        std::exception_ptr error;
        try {
            if (!step(task)) return false;
        } catch (...) {
            error = std::current_exception();
        }
        // Holds the tensors until the lock is free: letting go of the last one may wait for Python's lock.
        afterwards.push_back([work = task.work, buffers = task.buffers, error] {
            if (!error) buffers->finish();
            work->done(error);
        });
        return moved = true;
    };
    while (!collectives_.empty()) {
        if (!broken_.empty()) {
            const auto error = std::make_exception_ptr(std::runtime_error(broken_));
            Task& task = collectives_.front();
            afterwards.push_back([work = task.work, buffers = task.buffers, error] { work->done(error); });
        } else if (!try_step(collectives_.front())) {
            break;
        }
        collectives_.pop_front();
    }
    std::erase_if(messages_, try_step);
    return moved;
}

WorkPtr MpiBackend::collective(OpType op, const char* title, std::shared_ptr<Buffers> buffers, Stages stages,
                               Tensors outputs, std::chrono::milliseconds timeout, bool async) {
    auto work = c10::make_intrusive<MpiWork>(rank_, op, title, outputs, outputs);
    const auto limit = timeout == c10d::kUnsetTimeout ? timeout_ : timeout;
    Task task{work, std::move(buffers), Clock::now() + limit, "", std::move(stages), {}, {}, {}};
    Engine::get().submit(
        [&] {
            ++number_;
            collectives_.push_back(std::move(task));
        },
        async);
    return work;
}

WorkPtr MpiBackend::message(OpType op, const char* title, Tensors& tensors, int peer, int tag) {
    check(tensors, 1, title);
    auto buffers = std::make_shared<Buffers>();
    const bool sends = op == OpType::SEND;
    const at::Tensor x = sends ? buffers->read(tensors[0]) : buffers->write(tensors[0], false);
    auto work = c10::make_intrusive<MpiWork>(rank_, op, title, tensors, tensors);
    Task task{work,
              buffers,
              Clock::now() + timeout_,
              std::string(title) + " of " + std::to_string(x.nbytes()) + " bytes, peer " +
                  (peer == MPI_ANY_SOURCE ? "any" : std::to_string(peer)) + ", tag " + std::to_string(tag),
              {},
              {},
              {},
              {}};
    const std::size_t bytes = x.nbytes();
    for (std::size_t i = 0; i == 0 || i < bytes; i += max_message) {
        const std::size_t n = std::min(max_message, bytes - i);
        Byte* const start = bytes_of(x) + i;
        MpiWork* const mine = work.get();
        if (sends) {
            task.messages.push_back(
                [=, this] { return comm_->start_send(std::span<const Byte>(start, n), peer, tag); });
        } else {
            task.messages.push_back([=, this] {
                // pieces after the first come from where the first came from
                return comm_->start_receive(std::span<Byte>(start, n), i ? mine->source_ : peer, tag);
            });
        }
    }
    Engine::get().submit([&] { messages_.push_back(std::move(task)); }, true);
    return work;
}

}  // namespace fived
