#include "hybrid_libtorch.hpp"

#include <algorithm>
#include <limits>
#include <list>
#include <map>

#include "fived/math/partition.hpp"
#include "tp_libtorch.hpp"

namespace fived {

namespace {

Cut piece_along(Axis axis, int dim, std::int64_t length, const Mesh& mesh) {
    const Range mine = shard_of(std::size_t(length), mesh.size(axis), mesh.at(axis));
    return {{axis}, dim, std::int64_t(mine.begin), std::int64_t(mine.length)};
}

/// Number of the layer in "layers.3.mlp...", or -1.
int layer_of(const std::string& name) {
    return name.starts_with("layers.") ? std::stoi(name.substr(7)) : -1;
}

Ways ways(Mesh& mesh, const Layout& layout) {
    return {mesh.along({Axis::tp}),   mesh.along({Axis::sp}), mesh.along({Axis::ep}),
            layout.sequence_parallel, layout.order,           layout.kernel};
}

}  // namespace

Placement place(const std::string& name, at::IntArrayRef sizes, const Shape& shape, Mesh& mesh,
                bool sequence_parallel) {
    Placement placement;
    const int tp = mesh.size(Axis::tp), of_experts = is_expert(name);
    const bool keys = name.find("k_proj") != name.npos || name.find("v_proj") != name.npos;
    const bool shared = keys && shape.kv_heads % tp;  // whole, its gradient summed where it is used
    const int dim = split_dimension(name);
    if (tp > 1 && dim >= 0 && !shared)
        placement.cuts.push_back(piece_along(Axis::tp, dim + of_experts, sizes[dim + of_experts], mesh));
    const auto has = [&](const char* part) { return name.find(part) != name.npos; };
    const bool slice = has("norm.") || has("embed_positions") || has("o_proj.bias") || has("down_proj.bias");
    const bool share = of_experts && has("down_proj.bias");
    if (tp > 1 && (has("router") || share || (sequence_parallel && slice && !of_experts)))
        placement.tokens.insert(Axis::tp);
    if (of_experts && mesh.size(Axis::ep) > 1) {
        const int n = mesh.size(Axis::ep), e = mesh.at(Axis::ep);
        std::int64_t begin = 0;
        for (int r = 0; r < e; ++r) begin += experts_of(sizes[0], n, r);
        placement.cuts.push_back({{Axis::ep}, 0, begin, experts_of(sizes[0], n, e)});
    }
    return placement;
}

Hybrid::Hybrid(const Shape& shape, Mesh& mesh, const Layout& layout, at::ScalarType dtype, const Whole& whole)
    : shape_(shape),
      mesh_(mesh),
      layout_(layout),
      transformer_(shape, ways(mesh, layout), c10::make_intrusive<Deferred>()) {
    if (shape.layers < layout.schedule.stages())
        throw std::invalid_argument(std::to_string(shape.layers) + " layers are too few for " +
                                    std::to_string(layout.schedule.stages()) + " stages");
    make_groups();
    fill(dtype, whole);
    if (layout_.zero) shard();
    const Schedule& schedule = layout_.schedule;
    std::map<int, Executor::Stage> stages;
    for (int s = 0; s < schedule.stages(); ++s)
        if (schedule.owner[s] == mesh_.at(Axis::pp)) {
            const int begin = first_layer(shape_.layers, schedule.stages(), s);
            const int end = first_layer(shape_.layers, schedule.stages(), s + 1);
            stages[s] = [this, begin, end](const at::Tensor& x) {
                return transformer_.forward(x, begin, end);
            };
        }
    const auto loss = [this](const at::Tensor& logits, const at::Tensor& targets) {
        return transformer_.loss(logits, targets);
    };
    const auto between = [this](const at::Tensor& tokens_Bs) {
        const Range part = transformer_.outside(tokens_Bs.size(1));
        return std::vector<std::int64_t>{tokens_Bs.size(0), std::int64_t(part.length), shape_.width};
    };
    executor_ = std::make_unique<Executor>(schedule, std::move(stages), loss, mesh_.along({Axis::pp}),
                                           mesh_.along({Axis::pp}, " down"), between,
                                           at::TensorOptions(dtype), transformer_.deferred());
}

/// All groups, in one order on all ranks, before the ranks hold different parameters.
void Hybrid::make_groups() const {
    for (const Axis axis : every_axis) mesh_.along({axis});
    for (const Axes& axes : {token_axes, Axes{Axis::dp, Axis::ep}, every_axis}) mesh_.along(axes);
    mesh_.along({Axis::pp}, " down");
    for (const auto& [name, sizes] : shape_.parameters())
        mesh_.along(place(name, sizes, shape_, mesh_, layout_.sequence_parallel).gradient_axes());
}

/// This rank's parameters: those of its stages, cut as placed. A tied head is the embedding, which the first stage and the last
/// hold together.
void Hybrid::fill(at::ScalarType dtype, const Whole& whole) {
    const Schedule& schedule = layout_.schedule;
    const int me = mesh_.at(Axis::pp), first = schedule.owner.front(), last = schedule.owner.back();
    const bool tied = !shape_.llama && first != last;
    const RanksPtr holders = tied ? mesh_.part(Axis::pp, {first, last}, " tied") : RanksPtr();
    const auto holds = [&](const std::string& name) {
        if (name == "embed_tokens.weight") return me == first || (!shape_.llama && me == last);
        if (name == "embed_positions.weight") return me == first;
        const int layer = layer_of(name);
        if (layer < 0) return me == last;
        int stage = 0;
        while (first_layer(shape_.layers, schedule.stages(), stage + 1) <= layer) ++stage;
        return schedule.owner[stage] == me;
    };
    for (const auto& [name, sizes] : shape_.parameters()) {
        if (!holds(name)) continue;
        Placement placement = place(name, sizes, shape_, mesh_, layout_.sequence_parallel);
        if (tied && name == "embed_tokens.weight") placement.tied = holders;
        const at::Tensor value = placement.piece(whole(name, sizes));
        const at::Tensor mine = value.to(dtype).clone(at::MemoryFormat::Contiguous).requires_grad_();
        placed_.push_back({name, mine, placement});
        transformer_.mine[name] = mine;
    }
}

/// ZeRO's units: a layer's parameters with the same cuts and holders, or those outside of all layers. What other ranks hold too
/// must be cut there as here, so it shares no unit with parameters of another placement.
void Hybrid::shard() {
    using Key = std::tuple<int, bool, Axes, Axes>;
    std::map<Key, std::vector<std::size_t>> units;
    for (std::size_t i = 0; i < placed_.size(); ++i) {
        const Placement& p = placed_[i].placement;
        if (mesh_.along(p.gradient_axes())->size() > 1)
            units[{layer_of(placed_[i].name), bool(p.tied), p.cut_along(), p.gradient_axes()}].push_back(i);
    }
    pieces_ = placed_;
    for (const auto& [key, members] : units) {
        const Axes& axes = std::get<3>(key);
        const RanksPtr& holders = mesh_.along(axes);
        Tensors tensors;
        for (const std::size_t i : members) tensors.insert(tensors.begin(), placed_[i].tensor);
        const auto& unit = zero_.emplace_back(
            std::make_unique<Zero1>(tensors, mesh_.group(axes), std::numeric_limits<std::size_t>::max()));
        const Tensors pieces = unit->pieces();
        const auto sizes = unit->sizes();
        std::int64_t length = 0;
        for (std::size_t k = 0; k < members.size(); ++k) {
            Placed& piece = pieces_[members[members.size() - 1 - k]];
            std::int64_t begin = 0;
            for (int r = 0; r < holders->rank(); ++r) begin += sizes[k][std::size_t(r)];
            piece.tensor = pieces[k];
            piece.placement.cuts.push_back({axes, -1, begin, pieces[k].numel()});
            length += tensors[k].numel();
        }
        const std::int64_t n = holders->size();
        units_.push_back({axes, (length + n - 1) / n * n, std::int64_t(members.size())});
    }
}

at::Tensor Hybrid::step(const at::Tensor& tokens_BS, const at::Tensor& targets_BS) {
    transformer_.use(tokens_BS.size(1));
    transformer_.counts.clear();
    transformer_.moved = 0;
    const RanksPtr& tokens = mesh_.along(token_axes);
    const std::size_t B = std::size_t(tokens_BS.size(0)), M = std::size_t(layout_.schedule.micro_batches);
    const auto mine = [&](const at::Tensor& x_BS, std::size_t m) {  // a micro-batch; along sp its positions
        const std::size_t begin = cut(B, M, m);
        const at::Tensor x_bS = x_BS.narrow(0, std::int64_t(begin), std::int64_t(cut(B, M, m + 1) - begin));
        return mesh_.size(Axis::sp) > 1 ? x_bS.index_select(1, transformer_.positions()) : x_bS;
    };
    if (B < M)
        throw std::invalid_argument(std::to_string(B) + " samples are too few for " + std::to_string(M) +
                                    " micro-batches");
    std::vector<Part> parts;
    const at::Tensor count = at::zeros({1}, at::kLong);
    for (std::size_t m = 0; m < M; ++m) {
        parts.emplace_back(mine(tokens_BS, m), mine(targets_BS, m));
        count.add_(parts.back().second.ne(padding).sum());
    }
    all_reduce(count, *tokens);
    std::list<NoSync> quiet;  // what is accumulated leaves in finish()
    for (const auto& unit : zero_) quiet.emplace_back(unit->synchronising());
    const at::Tensor loss = executor_->run(parts, 1 / count.item<double>());
    finish();
    all_reduce(loss, *tokens);
    return loss / count.item<double>();
}

/// Turns every gradient into that of the global batch. A tied head's comes last: its holders must step with the same bits.
void Hybrid::finish() {
    for (const auto& unit : zero_) unit->finish();
    sum_gradients(parameters(), mesh_);
    sum_tied_gradients(parameters());
}

void Hybrid::stepped() {
    for (const auto& unit : zero_) unit->gather();
}

std::vector<Mesh::Sent> Hybrid::take_messages() {
    std::vector<Mesh::Sent> all = mesh_.take_messages();
    for (std::size_t i = 0; i < zero_.size(); ++i)
        for (Message& message : zero_[i]->take_messages())
            all.push_back({words(units_[i].axes), mesh_.along(units_[i].axes)->size(), std::move(message)});
    return all;
}

}  // namespace fived
