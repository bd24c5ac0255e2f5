#include "backend.hpp"

#include "fived/mpi/environment.hpp"

#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <functional>
#include <mutex>

#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

namespace fived {

using c10d::OpType;
using Byte = std::byte;

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

namespace {

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

/// Keeps the buffers of a failed operation that MPI, or another rank of the host, may still read or write.
void keep_for_ever(Stages stages, std::shared_ptr<Buffers> buffers) {
    static std::mutex mutex;
    static std::vector<std::pair<Stages, std::shared_ptr<Buffers>>> kept;
    const std::lock_guard lock(mutex);
    kept.emplace_back(std::move(stages), std::move(buffers));
}

/// Whether MPI takes addresses in a GPU's memory.
bool mpi_reads_devices() {
#ifdef MPIX_CUDA_AWARE_SUPPORT
    static const bool can = MPIX_Query_cuda_support();
    return can;
#else
    return false;
#endif
}

std::string listed(const std::vector<int>& ranks) {
    std::string text;
    for (const int r : ranks) text += (text.empty() ? "" : ", ") + std::to_string(r);
    return text;
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
    if (order_) order_->wait();
    return true;
}

c10::intrusive_ptr<c10::ivalue::Future> MpiWork::getFuture() {
    const std::lock_guard lock(mutex_);
    if (!future_) {
        std::vector<c10::Device> devices;
        if (order_) devices.push_back(order_->stream().device());
        future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::move(devices));
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
                       c10::intrusive_ptr<GroupOptions> options)
    : Backend(rank, size), name_(name), ranks_(std::move(ranks)), options_(std::move(options)) {
    Engine::get().check_process();
    static std::once_flag once;
    std::call_once(once, remove_dead_segments);
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
    options_->global_ranks_in_group.assign(ranks_.begin(), ranks_.end());
    options_->group_name = name_;
    comm_.emplace(members(name_, ranks_));
    const int per_host = options_->ranks_per_host;
    hosts_ =
        std::make_unique<Hosts>(*comm_, per_host > 0 ? world_rank / per_host : -1, options_->largest_message);
    Engine::get().expect_ranks(per_host > 0 ? size : hosts_->memory().size());
    Engine::get().add(this);
    end_with_mpi();
}

MpiBackend::~MpiBackend() {
    if (Engine::get().is_forked()) {  // what is MPI's is the parent's
        comm_->abandon();
        hosts_.release();
        return;
    }
    Engine::get().remove(this);
    const auto error = std::make_exception_ptr(std::runtime_error("group '" + name_ + "' was destroyed"));
    const auto give_back = [&](Task& task) {
        if (task.is_used_elsewhere()) keep_for_ever(std::move(task.stages), task.buffers);
        task.work->done(error);
    };
    for (Task& task : collectives_) give_back(task);
    for (Task& task : messages_) give_back(task);
}

c10::intrusive_ptr<c10d::Backend::Options> MpiBackend::getBackendOptions() {
    return c10::make_intrusive<GroupOptions>(*options_);
}

c10::intrusive_ptr<c10d::Backend> MpiBackend::split(const c10::intrusive_ptr<c10d::Store>&,
                                                    const std::vector<int>& ranks,
                                                    const c10::intrusive_ptr<c10d::Backend::Options>& given) {
    const auto me = std::ranges::find(ranks, rank_);
    if (me == ranks.end()) return nullptr;
    auto options = c10::make_intrusive<GroupOptions>(*options_);
    options->timeout = given->timeout;
    std::vector<int> in_world;
    for (const int r : ranks) in_world.push_back(ranks_.at(r));
    return c10::make_intrusive<MpiBackend>(int(me - ranks.begin()), int(ranks.size()), given->group_name,
                                           std::move(in_world), std::move(options));
}

c10::intrusive_ptr<c10d::Backend> MpiBackend::shrink(
    const std::vector<std::int64_t>& excluded, int, const c10::intrusive_ptr<c10d::Backend::Options>& given) {
    std::vector<int> left, gone(excluded.begin(), excluded.end());
    for (int r = 0; r < size_; ++r)
        if (std::ranges::find(gone, r) == gone.end()) left.push_back(r);
    auto options = c10::make_intrusive<GroupOptions>(*options_);
    if (given) options->timeout = given->timeout;
    options->group_name = name_ + " without " + listed(gone);
    auto part = split({}, left, options);
    if (!part) refuse("shrink of group '" + name_ + "': rank " + std::to_string(rank_) + " is excluded");
    return part;
}

at::Tensor MpiBackend::allocateTensor(long size, at::TensorOptions options) {
    std::shared_ptr<Byte> block;
    if (options.device().is_cpu() && size >= 0 && !Engine::get().is_forked())
        block = hosts_->memory().block(size * options.dtype().itemsize());
    return block ? at::from_blob(
                       block.get(), {size}, [block](void*) {}, options)
                 : at::empty({size}, options);
}

void MpiBackend::abort() {
    Engine::get().submit(
        [&] {
            ended_ = true;
            broken_ = "group '" + name_ + "' was aborted";
            return true;
        },
        false);
}

void MpiBackend::end() {
    ended_ = true;
    broken_ = "group '" + name_ + "': MPI has ended";
    for (Task& task : collectives_) task.stage.reset();
    for (Task& task : messages_) task.stage.reset();
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

/// Whom a call waits for, as far as this rank can know: local ranks one by one, others by their hosts.
std::string MpiBackend::missing(const Task& task) const {
    if (!task.stage) return "the device of its tensors";
    const Stage& stage = *task.stage;
    std::vector<int> late;
    if (stage.rounds)
        for (int r = 0; r < hosts_->memory().size(); ++r)
            if (!hosts_->memory().is_here(r)) late.push_back(hosts_->host_of(rank_)[r]);
    std::string text = late.empty() ? "" : "rank(s) " + listed(late);
    std::vector<int> named;
    for (const Message& message : stage.messages) {
        const std::vector<int>& host = hosts_->host_of(message.peer);
        if (std::ranges::find(named, host[0]) != named.end()) continue;
        named.push_back(host[0]);
        text += (text.empty() ? "" : " and ") + std::string("the host of rank(s) ") + listed(host);
    }
    return text;
}

/// Goes on as far as the others allow; true when done.
bool MpiBackend::go_on(Task& task) {
    if (task.next == 0 && !task.buffers->ready()) return false;
    while (task.stage || task.next < task.stages.size()) {
        if (!task.stage) task.stage.emplace(task.stages[task.next++]());
        Stage& stage = *task.stage;
        task.exposed |= stage.exposes;
        if (stage.rounds) {
            const auto mismatch = [&](int r, const Call& theirs) {
                throw Differs(hosts_->host_of(rank_)[r], stage.rounds->call(), theirs);
            };
            if (hosts_->memory().advance(*stage.rounds, mismatch)) stage.rounds.reset();
        }
        std::erase_if(stage.messages, [&](Message& message) {
            if (!message.request.test()) return false;
            task.work->source_ = message.request.source();
            return true;
        });
        if (stage.rounds || !stage.messages.empty()) return false;
        task.stage.reset();
    }
    return true;
}

/// As go_on; throws what the user is to see.
bool MpiBackend::step(Task& task) {
    const bool is_message = !task.what.empty();
    if (!broken_.empty() && (ended_ || !is_message)) throw std::runtime_error(broken_);
    const auto fail = [&](const std::string& why) {
        if (is_message) throw std::runtime_error(task.what + " in group '" + name_ + "': " + why);
        // The ranks no longer agree on what comes next: all later collectives fail too.
        broken_ = std::string(name_of(task.work->retrieveOpType())) + " in group '" + name_ + "', rank " +
                  std::to_string(rank_) + " of " + std::to_string(size_) + ": " + why;
        throw std::runtime_error(broken_);
    };
    std::string error;
    try {
        if (go_on(task)) return true;
    } catch (const Differs& found) {
        error = "this rank calls " + show(found.mine) + "; rank " + std::to_string(found.rank) + " calls " +
                show(found.theirs);
    } catch (const std::runtime_error& other) {
        error = other.what();
    }
    if (!error.empty()) fail(error);
    if ((++polls_ & 0xff) == 0 && Clock::now() > task.deadline) {
        const std::string limit = std::to_string(task.limit.count()) + " ms";
        fail(is_message ? "no match within " + limit
                        : "timed out after " + limit + "; it waits for " + missing(task));
    }
    return false;
}

bool MpiBackend::advance(std::vector<std::function<void()>>& afterwards) {
    bool moved = false;
    const auto try_step = [&](Task& task) {
        std::exception_ptr error;
        try {
            if (!step(task)) return false;
        } catch (...) {
            error = std::current_exception();
            if (task.is_used_elsewhere()) keep_for_ever(std::move(task.stages), task.buffers);
        }
        // Holds the tensors until the lock is free: letting go of the last one may wait for Python's lock.
        afterwards.push_back([work = task.work, buffers = task.buffers, error]() mutable {
            const auto guard = buffers->here();
            try {
                if (!error) buffers->finish();
            } catch (...) {  // a result that may not be written, such as one of inference mode
                error = std::current_exception();
            }
            work->done(error);
        });
        return moved = true;
    };
    while (!collectives_.empty() && try_step(collectives_.front())) collectives_.pop_front();
    std::erase_if(messages_, try_step);
    return moved;
}

MpiBackend::Task MpiBackend::task(OpType op, const char* title, std::shared_ptr<Buffers> buffers,
                                  Stages stages, const Tensors& outputs,
                                  std::chrono::milliseconds timeout) const {
    auto work = c10::make_intrusive<MpiWork>(rank_, op, title, outputs, outputs);
    work->order_ = buffers->order();
    const auto limit = timeout == c10d::kUnsetTimeout ? options_->timeout : timeout;
    return {work, std::move(buffers), limit, "", std::move(stages)};
}

/// What a collective returns. Nothing where the caller does not ask for it: it is done.
WorkPtr MpiBackend::given(WorkPtr work, bool async) {
    if (async) return work;
    if (work) work->wait();
    return {};
}

WorkPtr MpiBackend::collective(OpType op, const char* title, std::shared_ptr<Buffers> buffers, Stages stages,
                               const Tensors& outputs, std::chrono::milliseconds timeout, bool async) {
    Task next = task(op, title, std::move(buffers), std::move(stages), outputs, timeout);
    WorkPtr work = next.work;
    Engine::get().submit(
        [&] {
            ++number_;
            collectives_.push_back(std::move(next));
            return true;
        },
        async);
    return given(std::move(work), async);
}

/// An all-reduce in the calling thread, with no Task and, unless asked for, no Work: they take more time than a small sum.
/// Goes on as every other collective where that is not enough: if a rank is late or calls something else, or if
/// collectives are in flight before it.
WorkPtr MpiBackend::all_reduce_at_once(const Tensors& tensors, const c10d::AllreduceOptions& o) {
    RECORD_USER_SCOPE("fived:all_reduce");
    const auto op = OpType::ALLREDUCE;
    const at::Tensor& x = tensors[0];
    auto rounds = small_all_reduce(hosts_->memory(), call(op, x, x.numel(), {}, o.reduceOp), bytes_of(x),
                                   x.nbytes(), x.element_size(), kernel(x, o.reduceOp));
    const auto advance = [&] { return hosts_->memory().advance(rounds, [](int, const Call&) {}); };
    c10::intrusive_ptr<MpiWork> work;
    Engine::get().submit(
        [&] {
            ++number_;
            if (broken_.empty() && collectives_.empty() && Engine::get().spin(advance)) return false;
            auto buffers = buffer();
            buffers->write(x, true);
            collectives_.push_back(
                task(op, nullptr, buffers, {[rounds] { return Stage{rounds, {}}; }}, tensors, o.timeout));
            work = collectives_.back().work;
            return true;
        },
        o.asyncOp);
    if (o.asyncOp && !work) {
        work = c10::make_intrusive<MpiWork>(rank_, op, nullptr, tensors, tensors);
        work->done(nullptr);
    }
    return given(std::move(work), o.asyncOp);
}

WorkPtr MpiBackend::message(OpType op, const char* title, Tensors& tensors, int peer, int tag) {
    check(tensors, 1, title);
    if (op != OpType::RECVANYSOURCE) check_rank(title, peer);
    const bool sends = op == OpType::SEND;
    const bool straight = mpi_reads_devices() && !options_->staged;
    auto buffers = straight ? std::make_shared<Buffers>(Buffers::Via::nothing) : buffer();
    const at::Tensor x = sends ? buffers->read(tensors[0]) : buffers->write(tensors[0], false);
    auto work = c10::make_intrusive<MpiWork>(rank_, op, title, tensors, tensors);
    work->order_ = buffers->order();
    const std::string what = std::string(title) + " of " + std::to_string(x.nbytes()) + " bytes, peer " +
                             (peer == MPI_ANY_SOURCE ? "any" : std::to_string(peer)) + ", tag " +
                             std::to_string(tag);
    Stages stages;
    const std::size_t bytes = x.nbytes(), largest = std::min(options_->largest_message, max_message);
    for (std::size_t i = 0; i == 0 || i < bytes; i += largest) {
        const std::span<Byte> part(bytes_of(x) + i, std::min(largest, bytes - i));
        MpiWork* const mine = work.get();
        stages.push_back([=, this] {
            // pieces after the first come from where the first came from
            const int other = i ? mine->source_ : peer;
            Stage stage;
            stage.messages.push_back({sends ? comm_->start_send(std::span<const Byte>(part), peer, tag)
                                            : comm_->start_receive(part, other, tag),
                                      peer});
            return stage;
        });
    }
    Task task{work, buffers, options_->timeout, what, std::move(stages)};
    Engine::get().submit(
        [&] {
            messages_.push_back(std::move(task));
            return true;
        },
        true);
    return work;
}

}  // namespace fived
