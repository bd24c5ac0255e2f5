// torch.distributed on MPI: a process group whose ranks were started by mpirun.
//
//     collectives       fived/mpi/hosts.hpp: shared memory inside a host, messages between hosts
//     send, recv        MPI_Isend, MPI_Irecv
//     GPU tensors       by way of pinned host memory (buffers.hpp); send, recv straight where MPI can
//     who is there      MPI_Comm_create_group: any subset of the world, made by its members alone
//
// Every rank says first what it takes part in. So a call that does not match those of the others is an error on every
// rank, in which each is named, and not a hang or a wrong sum.
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
#include "fived/mpi/hosts.hpp"
#include "fived/mpi/mpi.hpp"
#include "progress.hpp"

namespace fived {

using Tensors = std::vector<at::Tensor>;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;

const char* name_of(c10d::OpType op);

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
    std::shared_ptr<Order> order_;
    std::atomic<bool> done_ = false;
    c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// How a group works. The defaults are what a user wants; tests want the rest.
struct GroupOptions final : c10d::Backend::Options {
    explicit GroupOptions(std::chrono::milliseconds timeout) : c10d::Backend::Options("fived", timeout) {}
    int ranks_per_host = 0;                     // take so many ranks of the world for a host; 0: ask MPI
    std::size_t largest_message = max_message;  // bytes; longer ones travel in pieces
    bool staged = false;                        // CPU tensors too by way of other memory
};

class MpiBackend final : public c10d::Backend, private Party {
  public:
    /// Collective over the members. `ranks` are the members' ranks in MPI_COMM_WORLD, in order; empty: all.
    /// Throws std::invalid_argument when MPI is not running.
    MpiBackend(int rank, int size, const std::string& name, std::vector<int> ranks,
               c10::intrusive_ptr<GroupOptions> options);
    MpiBackend(int rank, int size, const std::string& name, std::vector<int> ranks,
               std::chrono::milliseconds timeout)
        : MpiBackend(rank, size, name, std::move(ranks), c10::make_intrusive<GroupOptions>(timeout)) {}
    ~MpiBackend() override;

    const std::string getBackendName() const override { return "fived"; }
    void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
    void setSequenceNumberForGroup() override {}
    std::uint64_t getSequenceNumberForGroup() override { return number_; }
    c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
    bool supportsSplitting() const override { return true; }
    bool supportsShrinking() const override { return true; }
    /// Collective over `ranks` of this group; the others get nothing and need not call.
    c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
                                      const c10::intrusive_ptr<c10d::Backend::Options>&) override;
    /// Collective over all but `excluded`.
    c10::intrusive_ptr<Backend> shrink(const std::vector<std::int64_t>& excluded, int flags,
                                       const c10::intrusive_ptr<c10d::Backend::Options>&) override;
    /// Whatever is under way or called later fails.
    void abort() override;

    /// True without an index, as CPUs are: there are no arenas on GPUs.
    bool supportsTensorAlloc(c10::DeviceIndex index) override { return index < 0; }
    /// Returns `size` uninitialised numbers; on the CPU in an arena of this rank's host, if that has room.
    at::Tensor allocateTensor(long size, at::TensorOptions options) override;

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
    /// A call under way.
    struct Task {
        c10::intrusive_ptr<MpiWork> work;
        std::shared_ptr<Buffers> buffers;
        std::chrono::milliseconds limit;
        std::string what;  // of a message: "send of 4 bytes, peer 1"; nothing of a collective
        Stages stages;
        std::size_t next = 0;
        std::optional<Stage> stage = {};
        bool exposed = false;  // other ranks may write the results
        Clock::time_point deadline = Clock::now() + limit;
        bool is_used_elsewhere() const { return exposed || (stage && !stage->messages.empty()); }
    };

    bool advance(std::vector<std::function<void()>>& afterwards) override;
    bool busy() const override { return !collectives_.empty() || !messages_.empty(); }
    void end() override;
    bool step(Task& task);
    bool go_on(Task& task);
    std::string missing(const Task& task) const;
    std::string show(const Call& call) const;
    Call call(c10d::OpType op, const at::Tensor& tensor, std::int64_t elements, std::optional<int> root = {},
              c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM);
    Task task(c10d::OpType op, const char* title, std::shared_ptr<Buffers> buffers, Stages stages,
              const Tensors& outputs, std::chrono::milliseconds timeout) const;
    static WorkPtr given(WorkPtr work, bool async);
    WorkPtr collective(c10d::OpType op, const char* title, std::shared_ptr<Buffers> buffers, Stages stages,
                       const Tensors& outputs, std::chrono::milliseconds timeout, bool async);
    WorkPtr all_reduce_at_once(const Tensors& tensors, const c10d::AllreduceOptions& o);
    WorkPtr message(c10d::OpType op, const char* title, Tensors& tensors, int peer, int tag);
    void check(const Tensors& tensors, std::size_t count, const char* call) const;
    void check_rank(const char* call, int rank) const;
    std::shared_ptr<Buffers> buffer() const;
    Reduce kernel(const at::Tensor& x, c10d::ReduceOp::RedOpType op) const;
    void append(Stages& stages, Stages more, const at::Tensor& result = {},
                c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM) const;

    std::string name_;
    std::vector<int> ranks_;
    c10::intrusive_ptr<GroupOptions> options_;
    std::optional<Communicator> comm_;
    std::unique_ptr<Hosts> hosts_;
    std::deque<Task> collectives_;
    std::list<Task> messages_;
    std::uint64_t number_ = 0;
    std::uint64_t polls_ = 0;
    std::string broken_;  // why no collective can work any more
    bool ended_ = false;  // and no message
};

}  // namespace fived
