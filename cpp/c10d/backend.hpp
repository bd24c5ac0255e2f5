// torch.distributed on MPI: a process group whose ranks were started by mpirun.
//
//     collectives       HostMemory (fived/shared_memory.hpp): all ranks of a group are on one host
//     send, recv        MPI_Isend, MPI_Irecv
//     who is there      MPI_Comm_create_group: any subset of the world, made by its members alone
//
// Every rank says in the first round of a collective what it takes part in. So a call that does not match those of
// the others is an error on every rank, in which each is named, and not a hang or a wrong sum.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "buffers.hpp"
#include "fived/mpi.hpp"
#include "fived/shared_memory.hpp"
#include "progress.hpp"

namespace fived {

using Tensors = std::vector<at::Tensor>;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;

/// What a call on the group returns. wait() also moves on all other operations of this process.
class MpiWork final : public Work {
  public:
    MpiWork(int rank, c10d::OpType op, const char* title, const Tensors& inputs, Tensors outputs)
        : Work(rank, op, title, inputs), outputs_(std::move(outputs)) {}
    bool isCompleted() override;
    bool wait(std::chrono::milliseconds timeout) override;
    Tensors result() override { return outputs_; }
    int sourceRank() const override { return source_; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  private:
    friend class MpiBackend;
    void done(std::exception_ptr error);

    Tensors outputs_;
    int source_ = -1;
    std::atomic<bool> done_ = false;
    c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class MpiBackend final : public c10d::Backend, private Party {
  public:
    /// Collective over the members. `ranks` are the members' ranks in MPI_COMM_WORLD, in order; empty: all.
    /// Throws std::invalid_argument when MPI is not running or the members are not on one host.
    MpiBackend(int rank, int size, const std::string& name, std::vector<int> ranks,
               std::chrono::milliseconds timeout);
    ~MpiBackend() override;

    const std::string getBackendName() const override { return "fived"; }
    void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
    void setSequenceNumberForGroup() override {}
    std::uint64_t getSequenceNumberForGroup() override { return number_; }

    WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override;
    WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override;
    WorkPtr allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
    WorkPtr reduce(Tensors&, const c10d::ReduceOptions&) override;
    WorkPtr allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
    WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
    WorkPtr allgather_coalesced(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
    WorkPtr allgather_into_tensor_coalesced(Tensors&, Tensors&, const c10d::AllgatherOptions&) override;
    WorkPtr gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
    WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
    WorkPtr reduce_scatter(Tensors&, std::vector<Tensors>&, const c10d::ReduceScatterOptions&) override;
    WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override;
    WorkPtr reduce_scatter_tensor_coalesced(Tensors&, Tensors&, const c10d::ReduceScatterOptions&) override;
    WorkPtr alltoall_base(at::Tensor&, at::Tensor&, std::vector<std::int64_t>&, std::vector<std::int64_t>&,
                          const c10d::AllToAllOptions&) override;
    WorkPtr alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
    WorkPtr send(Tensors&, int to, int tag) override;
    WorkPtr recv(Tensors&, int from, int tag) override;
    WorkPtr recvAnysource(Tensors&, int tag) override;
    WorkPtr barrier(const c10d::BarrierOptions&) override;
    void monitoredBarrier(const c10d::BarrierOptions&, bool) override;

  private:
    using Clock = std::chrono::steady_clock;
    /// A call under way. A collective runs its stages one after the other; a message is MPI's.
    struct Task {
        c10::intrusive_ptr<MpiWork> work;
        std::shared_ptr<Buffers> buffers;
        Clock::time_point deadline;
        std::string what;  // of a message: "send of 4 bytes to rank 1"
        std::deque<std::function<Rounds()>> stages;
        std::optional<Rounds> rounds;
        std::deque<std::function<Request()>> messages;
        std::optional<Request> request;
    };
    using Stages = std::deque<std::function<Rounds()>>;

    bool advance(std::vector<std::function<void()>>& afterwards) override;
    bool busy() const override { return !collectives_.empty() || !messages_.empty(); }
    void end() override;
    bool step(Task& task);
    void give_up(Task& task, const std::string& why);
    std::string show(const Call& call) const;
    Call call(c10d::OpType op, const at::Tensor& tensor, std::int64_t elements, int root = 0,
              c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM);
    WorkPtr collective(c10d::OpType op, const char* title, std::shared_ptr<Buffers> buffers, Stages stages,
                       Tensors outputs, std::chrono::milliseconds timeout, bool async);
    WorkPtr message(c10d::OpType op, const char* title, Tensors& tensors, int peer, int tag);
    void check(const Tensors& tensors, std::size_t count, const char* call) const;

    std::string name_;
    std::vector<int> ranks_;
    std::chrono::milliseconds timeout_;
    std::optional<Communicator> comm_;
    std::unique_ptr<HostMemory> memory_;
    std::deque<Task> collectives_;
    std::list<Task> messages_;
    std::uint64_t number_ = 0;
    std::uint64_t polls_ = 0;
    std::string broken_;
    bool ended_ = false;
};

}  // namespace fived
