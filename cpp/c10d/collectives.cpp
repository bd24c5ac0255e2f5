// The calls of torch.distributed, each as the stages that Hosts makes of it.
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <algorithm>
#include <iterator>

#include "backend.hpp"
#include "reduce.hpp"

namespace fived {

using c10d::OpType;
using Byte = std::byte;

namespace {

std::string size_of(const at::Tensor& t) {
    return std::to_string(t.numel()) + " " + c10::toString(t.scalar_type());
}

/// What `from` holds, `times` over, must fill `to`.
void fits(const char* call, const at::Tensor& from, std::int64_t times, const at::Tensor& to) {
    if (to.numel() != from.numel() * times || to.scalar_type() != from.scalar_type())
        throw std::invalid_argument(std::string(call) + ": " + std::to_string(times) + " x " + size_of(from) +
                                    " do not fill " + size_of(to));
}

[[noreturn]] void refuse(const std::string& why) {
    throw std::invalid_argument(why);
}

}  // namespace

/// Elements -1: they may differ between ranks.
Call MpiBackend::call(OpType op, const at::Tensor& tensor, std::int64_t elements, std::optional<int> root,
                      c10d::ReduceOp::RedOpType reduction) {
    if (root) check_rank(name_of(op), *root);
    return {.operation = std::uint32_t(op) | std::uint32_t(reduction) << 8,
            .type = tensor.defined() ? std::uint32_t(tensor.scalar_type()) : 0xff,
            .elements = std::uint64_t(std::max<std::int64_t>(elements, 0)),
            .root = std::uint64_t(root ? *root + 1 : 0),
            .number = number_};
}

void MpiBackend::check(const Tensors& tensors, std::size_t count, const char* call) const {
    const auto start = [&] { return std::string(call) + " in group '" + name_ + "': "; };
    if (tensors.size() != count)
        refuse(start() + std::to_string(tensors.size()) + " tensors where " + std::to_string(count) +
               " are needed");
    for (const at::Tensor& t : tensors) {
        if (!t.is_cpu() && !t.is_cuda())
            refuse(start() + "a tensor on " + t.device().str() +
                   "; the backend 'fived' moves tensors of CPUs and of CUDA or ROCm devices");
        if (t.device() != tensors[0].device())
            refuse(start() + "tensors on two devices, " + tensors[0].device().str() + " and " +
                   t.device().str());
        if (t.layout() != at::kStrided) refuse(start() + "a tensor that is not dense");
        if (t.scalar_type() != tensors[0].scalar_type())
            refuse(start() + "tensors of two types, " + size_of(tensors[0]) + " and " + size_of(t));
    }
}

void MpiBackend::check_rank(const char* call, int rank) const {
    if (rank < 0 || rank >= size_)
        refuse(std::string(call) + " in group '" + name_ + "': there is no rank " + std::to_string(rank) +
               "; there are 0 to " + std::to_string(size_ - 1));
}

std::shared_ptr<Buffers> MpiBackend::buffer() const {
    return std::make_shared<Buffers>(options_->staged ? Buffers::Via::host : Buffers::Via::automatic);
}

/// The kernel of a sum that may go through several hosts: averages are divided at the end, when all terms are there.
Reduce MpiBackend::kernel(const at::Tensor& x, c10d::ReduceOp::RedOpType op) const {
    const Reduce whole = reduction(x.scalar_type(), op);
    const bool later = op == c10d::ReduceOp::AVG && hosts_->count() > 1;
    return later ? reduction(x.scalar_type(), c10d::ReduceOp::SUM) : whole;
}

void MpiBackend::append(Stages& stages, Stages more, const at::Tensor& result,
                        c10d::ReduceOp::RedOpType op) const {
    std::ranges::move(more, std::back_inserter(stages));
    if (op == c10d::ReduceOp::AVG && hosts_->count() > 1)
        stages.push_back([=, n = size_] {
            const at::NoGradGuard no_grad;
            if (result.defined()) at::Tensor(result).div_(n);
            return Stage{};
        });
}

WorkPtr MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) {
    check(tensors, 1, "broadcast");
    auto buffers = buffer();
    const at::Tensor x = buffers->write(tensors[0], true);
    const int root = int(o.rootRank);
    const Call what = call(OpType::BROADCAST, x, x.numel(), root);
    return collective(OpType::BROADCAST, "fived:broadcast", buffers,
                      hosts_->broadcast(what, bytes_of(x), x.nbytes(), root), tensors, o.timeout, o.asyncOp);
}

WorkPtr MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) {
    check(tensors, 1, "all_reduce");
    const at::Tensor& x = tensors[0];
    if (x.is_cpu() && x.is_contiguous() && !options_->staged && hosts_->count() == 1 &&
        is_small(hosts_->memory(), x.nbytes()))
        return all_reduce_at_once(tensors, o);
    c10d::AllreduceCoalescedOptions options;
    static_cast<c10d::AllreduceOptions&>(options) = o;
    return allreduce_coalesced(tensors, options);
}

WorkPtr MpiBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) {
    check(tensors, tensors.size(), "all_reduce");
    auto buffers = buffer();
    Stages stages;
    for (const at::Tensor& t : tensors) {
        const at::Tensor x = buffers->write(t, true);
        const Call what = call(OpType::ALLREDUCE, x, x.numel(), {}, o.reduceOp);
        append(stages,
               hosts_->all_reduce(what, bytes_of(x), x.nbytes(), x.element_size(), kernel(x, o.reduceOp)), x,
               o.reduceOp);
    }
    return collective(OpType::ALLREDUCE, "fived:all_reduce", buffers, std::move(stages), tensors, o.timeout,
                      o.asyncOp);
}

WorkPtr MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& o) {
    check(tensors, 1, "reduce");
    auto buffers = buffer();
    const at::Tensor x = buffers->write(tensors[0], true);
    const int root = int(o.rootRank);
    const Call what = call(OpType::REDUCE, x, x.numel(), root, o.reduceOp);
    Stages stages;
    append(stages,
           hosts_->all_reduce(what, bytes_of(x), x.nbytes(), x.element_size(), kernel(x, o.reduceOp), root),
           rank_ == root ? x : at::Tensor(), o.reduceOp);
    return collective(OpType::REDUCE, "fived:reduce", buffers, std::move(stages), tensors, o.timeout,
                      o.asyncOp);
}

WorkPtr MpiBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& o) {
    if (inputs.size() != 1 || outputs.size() != 1) refuse("all_gather takes one tensor and one list");
    return allgather_coalesced(outputs, inputs, o);
}

/// outputs[i][r] gets inputs[i] of rank r.
WorkPtr MpiBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& o) {
    check(inputs, inputs.size(), "all_gather");
    auto buffers = buffer();
    Stages stages;
    Tensors results;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        check(outputs[i], size_, "all_gather");
        const at::Tensor x = buffers->read(inputs[i]);
        std::vector<Byte*> places;
        for (const at::Tensor& t : outputs[i]) {
            fits("all_gather", x, 1, t);
            places.push_back(bytes_of(buffers->write(t, false)));
            results.push_back(t);
        }
        const Call what = call(OpType::ALLGATHER, x, x.numel());
        append(stages, hosts_->all_gather(what, bytes_of(x), places, x.nbytes()));
    }
    return collective(OpType::ALLGATHER, "fived:all_gather", buffers, std::move(stages), results, o.timeout,
                      o.asyncOp);
}

WorkPtr MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& o) {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, o);
}

WorkPtr MpiBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& o) {
    check(outputs, inputs.size(), "all_gather");
    std::vector<Tensors> lists;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        fits("all_gather", inputs[i], size_, outputs[i]);
        lists.push_back(outputs[i].view({-1}).tensor_split(size_));
    }
    return allgather_coalesced(lists, inputs, o);
}

WorkPtr MpiBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& o) {
    check(inputs, 1, "gather");
    auto buffers = buffer();
    const at::Tensor x = buffers->read(inputs[0]);
    const int root = int(o.rootRank);
    std::vector<Byte*> places(size_);
    Tensors results;
    if (rank_ == root) {
        if (outputs.size() != 1) refuse("gather takes one list on the root");
        check(outputs[0], size_, "gather");
        for (int r = 0; r < size_; ++r) {
            fits("gather", x, 1, outputs[0][r]);
            places[r] = bytes_of(buffers->write(outputs[0][r], false));
        }
        results = outputs[0];
    }
    const Call what = call(OpType::GATHER, x, x.numel(), root);
    return collective(OpType::GATHER, "fived:gather", buffers,
                      hosts_->gather(what, bytes_of(x), places, x.nbytes(), root), results, o.timeout,
                      o.asyncOp);
}

WorkPtr MpiBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& o) {
    check(outputs, 1, "scatter");
    auto buffers = buffer();
    const at::Tensor y = buffers->write(outputs[0], false);
    const int root = int(o.rootRank);
    Inputs in(size_);
    if (rank_ == root) {
        if (inputs.size() != 1) refuse("scatter takes one list on the root");
        check(inputs[0], size_, "scatter");
        for (int r = 0; r < size_; ++r) {
            fits("scatter", inputs[0][r], 1, y);
            const at::Tensor x = buffers->read(inputs[0][r]);
            in[r] = {bytes_of(x), x.nbytes()};
        }
    }
    const Call what = call(OpType::SCATTER, y, y.numel(), root);
    return collective(OpType::SCATTER, "fived:scatter", buffers,
                      hosts_->scatter(what, in, {bytes_of(y), y.nbytes()}, root), outputs, o.timeout,
                      o.asyncOp);
}

WorkPtr MpiBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ReduceScatterOptions& o) {
    check(outputs, inputs.size(), "reduce_scatter");
    auto buffers = buffer();
    Stages stages;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        check(inputs[i], size_, "reduce_scatter");
        const at::Tensor y = buffers->write(outputs[i], false);
        std::vector<const Byte*> in;
        for (const at::Tensor& t : inputs[i]) {
            fits("reduce_scatter", t, 1, y);
            in.push_back(bytes_of(buffers->read(t)));
        }
        const Call what = call(OpType::REDUCE_SCATTER, y, y.numel(), {}, o.reduceOp);
        append(stages,
               hosts_->reduce_scatter(what, in, bytes_of(y), y.nbytes(), y.element_size(),
                                      kernel(y, o.reduceOp)),
               y, o.reduceOp);
    }
    return collective(OpType::REDUCE_SCATTER, "fived:reduce_scatter", buffers, std::move(stages), outputs,
                      o.timeout, o.asyncOp);
}

WorkPtr MpiBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::ReduceScatterOptions& o) {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, o);
}

WorkPtr MpiBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::ReduceScatterOptions& o) {
    check(outputs, inputs.size(), "reduce_scatter");
    std::vector<Tensors> lists;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        fits("reduce_scatter", outputs[i], size_, inputs[i]);
        lists.push_back(inputs[i].flatten().tensor_split(size_));
    }
    return reduce_scatter(outputs, lists, o);
}

WorkPtr MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                  std::vector<std::int64_t>& output_splits,
                                  std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& o) {
    c10d::checkSplitSizes(output_splits, output, size_);
    c10d::checkSplitSizes(input_splits, input, size_);
    const auto pieces = [&](const at::Tensor& t, const std::vector<std::int64_t>& splits) {
        return splits.empty() ? t.tensor_split(size_) : t.split_with_sizes(splits);
    };
    // Views of contiguous tensors along the first dimension are contiguous.
    auto outputs = pieces(output, output_splits), inputs = pieces(input, input_splits);
    return alltoall(outputs, inputs, o);
}

WorkPtr MpiBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& o) {
    check(outputs, size_, "all_to_all");
    check(inputs, size_, "all_to_all");
    check({inputs[0], outputs[0]}, 2, "all_to_all");
    auto buffers = buffer();
    StridedInputs in;
    StridedOutputs out;
    for (int r = 0; r < size_; ++r) {
        in.push_back(buffers->read_strided(inputs[r], hosts_->is_on_this_host(r)));
        out.push_back(buffers->write_strided(outputs[r], hosts_->is_on_this_host(r)));
    }
    return collective(OpType::ALLTOALL, "fived:all_to_all", buffers,
                      hosts_->all_to_all(call(OpType::ALLTOALL, inputs[0], -1), in, out), outputs, o.timeout,
                      o.asyncOp);
}

WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& o) {
    return collective(OpType::BARRIER, "fived:barrier", buffer(),
                      hosts_->barrier(call(OpType::BARRIER, {}, 0)), {}, o.timeout, o.asyncOp);
}

/// Every barrier names the ranks that did not come.
void MpiBackend::monitoredBarrier(const c10d::BarrierOptions& o, bool) {
    barrier(o)->wait();
}

WorkPtr MpiBackend::send(Tensors& tensors, int to, int tag) {
    return message(OpType::SEND, "fived:send", tensors, to, tag);
}
WorkPtr MpiBackend::recv(Tensors& tensors, int from, int tag) {
    return message(OpType::RECV, "fived:recv", tensors, from, tag);
}
WorkPtr MpiBackend::recvAnysource(Tensors& tensors, int tag) {
    return message(OpType::RECVANYSOURCE, "fived:recv_any_source", tensors, MPI_ANY_SOURCE, tag);
}

}  // namespace fived
