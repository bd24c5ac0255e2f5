// The calls of torch.distributed, each as stages of rounds in the host's memory.
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <algorithm>

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

/// Elements -1: they may differ between ranks. Root: counted from 1, 0 for none.
Call MpiBackend::call(OpType op, const at::Tensor& tensor, std::int64_t elements, int root,
                      c10d::ReduceOp::RedOpType reduction) {
    return {.operation = std::uint32_t(op) | std::uint32_t(reduction) << 8,
            .type = tensor.defined() ? std::uint32_t(tensor.scalar_type()) : 0xff,
            .elements = std::uint64_t(std::max<std::int64_t>(elements, 0)),
            .root = std::uint64_t(root),
            .number = number_};
}

void MpiBackend::check(const Tensors& tensors, std::size_t count, const char* call) const {
    const auto start = [&] { return std::string(call) + " in group '" + name_ + "': "; };
    if (tensors.size() != count)
        refuse(start() + std::to_string(tensors.size()) + " tensors where " + std::to_string(count) +
               " are needed");
    for (const at::Tensor& t : tensors) {
        if (!t.device().is_cpu())
            refuse(start() + "a tensor on " + t.device().str() +
                   "; the backend 'fived' moves tensors of the CPU");
        if (t.layout() != at::kStrided) refuse(start() + "a tensor that is not dense");
        if (t.scalar_type() != tensors[0].scalar_type())
            refuse(start() + "tensors of two types, " + size_of(tensors[0]) + " and " + size_of(t));
    }
}

WorkPtr MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) {
    check(tensors, 1, "broadcast");
    auto buffers = std::make_shared<Buffers>();
    const at::Tensor x = buffers->write(tensors[0], true);
    const int root = int(o.rootRank);
    const Call what = call(OpType::BROADCAST, x, x.numel(), root + 1);
    return collective(OpType::BROADCAST, "fived:broadcast", buffers,
                      {[=, this] { return fived::broadcast(*memory_, what, bytes_of(x), x.nbytes(), root); }},
                      tensors, o.timeout, o.asyncOp);
}

WorkPtr MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) {
    check(tensors, 1, "all_reduce");
    c10d::AllreduceCoalescedOptions options;
    static_cast<c10d::AllreduceOptions&>(options) = o;
    return allreduce_coalesced(tensors, options);
}

WorkPtr MpiBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) {
    check(tensors, tensors.size(), "all_reduce");
    auto buffers = std::make_shared<Buffers>();
    Stages stages;
    for (const at::Tensor& t : tensors) {
        const at::Tensor x = buffers->write(t, true);
        const Reduce kernel = reduction(x.scalar_type(), o.reduceOp);
        const Call what = call(OpType::ALLREDUCE, x, x.numel(), 0, o.reduceOp);
        stages.push_back([=, this] {
            return all_reduce(*memory_, what, bytes_of(x), x.nbytes(), x.element_size(), kernel);
        });
    }
    return collective(OpType::ALLREDUCE, "fived:all_reduce", buffers, std::move(stages), tensors, o.timeout,
                      o.asyncOp);
}

WorkPtr MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& o) {
    check(tensors, 1, "reduce");
    auto buffers = std::make_shared<Buffers>();
    const at::Tensor x = buffers->write(tensors[0], true);
    const int root = int(o.rootRank);
    const Reduce kernel = reduction(x.scalar_type(), o.reduceOp);
    const Call what = call(OpType::REDUCE, x, x.numel(), root + 1, o.reduceOp);
    return collective(OpType::REDUCE, "fived:reduce", buffers, {[=, this] {
                          return all_reduce(*memory_, what, bytes_of(x), x.nbytes(), x.element_size(), kernel,
                                            root);
                      }},
                      tensors, o.timeout, o.asyncOp);
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
    auto buffers = std::make_shared<Buffers>();
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
        stages.push_back([=, this] { return all_gather(*memory_, what, bytes_of(x), places, x.nbytes()); });
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
    auto buffers = std::make_shared<Buffers>();
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
    const Call what = call(OpType::GATHER, x, x.numel(), root + 1);
    return collective(OpType::GATHER, "fived:gather", buffers, {[=, this] {
                          return all_gather(*memory_, what, bytes_of(x), places, x.nbytes(), root);
                      }},
                      results, o.timeout, o.asyncOp);
}

WorkPtr MpiBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& o) {
    check(outputs, 1, "scatter");
    auto buffers = std::make_shared<Buffers>();
    const at::Tensor y = buffers->write(outputs[0], false);
    const int root = int(o.rootRank);
    std::vector<std::span<const Byte>> in(size_);
    std::vector<std::span<Byte>> out(size_);
    out[root] = {bytes_of(y), y.nbytes()};
    if (rank_ == root) {
        if (inputs.size() != 1) refuse("scatter takes one list on the root");
        check(inputs[0], size_, "scatter");
        for (int r = 0; r < size_; ++r) {
            fits("scatter", inputs[0][r], 1, y);
            const at::Tensor x = buffers->read(inputs[0][r]);
            in[r] = {bytes_of(x), x.nbytes()};
        }
    }
    const Call what = call(OpType::SCATTER, y, y.numel(), root + 1);
    return collective(OpType::SCATTER, "fived:scatter", buffers,
                      {[=, this] { return all_to_all(*memory_, what, in, out, y.nbytes()); }}, outputs,
                      o.timeout, o.asyncOp);
}

WorkPtr MpiBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ReduceScatterOptions& o) {
    check(outputs, inputs.size(), "reduce_scatter");
    auto buffers = std::make_shared<Buffers>();
    Stages stages;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        check(inputs[i], size_, "reduce_scatter");
        const at::Tensor y = buffers->write(outputs[i], false);
        std::vector<const Byte*> in;
        for (const at::Tensor& t : inputs[i]) {
            fits("reduce_scatter", t, 1, y);
            in.push_back(bytes_of(buffers->read(t)));
        }
        const Reduce kernel = reduction(y.scalar_type(), o.reduceOp);
        const Call what = call(OpType::REDUCE_SCATTER, y, y.numel(), 0, o.reduceOp);
        stages.push_back([=, this] {
            return fived::reduce_scatter(*memory_, what, in, bytes_of(y), y.nbytes(), y.element_size(),
                                         kernel);
        });
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
    auto buffers = std::make_shared<Buffers>();
    std::vector<std::span<const Byte>> in;
    std::vector<std::span<Byte>> out;
    for (int r = 0; r < size_; ++r) {
        const at::Tensor x = buffers->read(inputs[r]), y = buffers->write(outputs[r], false);
        in.emplace_back(bytes_of(x), x.nbytes());
        out.emplace_back(bytes_of(y), y.nbytes());
    }
    // First all tell all how long their pieces are: every rank must know the longest of all.
    struct Lengths {
        std::vector<std::uint64_t> mine, all;
    };
    auto lengths = std::make_shared<Lengths>();
    for (const auto& piece : in) lengths->mine.push_back(piece.size());
    lengths->all.resize(std::size_t(size_) * size_);
    const Call what = call(OpType::ALLTOALL, inputs[0], -1);
    Stages stages;
    stages.push_back([=, this] {
        std::vector<Byte*> rows;
        const std::size_t bytes = size_ * sizeof(std::uint64_t);
        for (int r = 0; r < size_; ++r) rows.push_back(reinterpret_cast<Byte*>(&lengths->all[r * size_]));
        return all_gather(*memory_, what, reinterpret_cast<const Byte*>(lengths->mine.data()), rows, bytes);
    });
    stages.push_back([=, this] {
        for (int r = 0; r < size_; ++r)
            if (const std::size_t given = lengths->all[r * size_ + rank_]; given != out[r].size())
                throw std::runtime_error("all_to_all in group '" + name_ + "': rank " + std::to_string(r) +
                                         " sends " + std::to_string(given) + " bytes to rank " +
                                         std::to_string(rank_) + ", which expects " +
                                         std::to_string(out[r].size()));
        const std::size_t longest = *std::max_element(lengths->all.begin(), lengths->all.end());
        return all_to_all(*memory_, what, in, out, longest);
    });
    return collective(OpType::ALLTOALL, "fived:all_to_all", buffers, std::move(stages), outputs, o.timeout,
                      o.asyncOp);
}

WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& o) {
    const Call what = call(OpType::BARRIER, {}, 0);
    return collective(OpType::BARRIER, "fived:barrier", std::make_shared<Buffers>(),
                      {[=] { return fived::barrier(what); }}, {}, o.timeout, o.asyncOp);
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
