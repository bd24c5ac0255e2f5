// Bytes that a rank sends in a step, by formula, along each line of the mesh, as hybrid_bytes.py has them:
//
//     tp          8 (P-1)/P |x| a layer, embedding and head 2 each; 3 numbers a token for the loss, 2 (P-1)/P of them
//     sp          3 (P-1) times this rank's keys and values: once forward, twice backward
//     ep          rows to experts and back, forward and backward: 2 (s + r) D; 8 bytes for each expert elsewhere
//     pp          |x| for every border between two ranks; the loss; the gradient of the embedding where two ranks hold it
//     dp+ep+sp    the loss and the number of targets; as on all lines with dp, 2 (P-1)/P of the gradients that are summed there
//
// |x|: the activations [N, D] of this rank's tokens between layers, of all micro-batches. s rows go to experts of other ranks
// and r come from there: those of the last step, before the first step as many as with even load.
//
// P ranks of the line  N tokens  D width
#pragma once

#include <cstdint>

#include "hybrid_mpi.hpp"

namespace fived {

/// tokens: of this rank, in all micro-batches.
template <class T>
Bytes bytes_by_formula(const Hybrid<T>& model, std::int64_t tokens) {
    const ModelShape& shape = model.shape();
    const Mesh& mesh = model.mesh();
    const Schedule& schedule = model.schedule();
    const std::int64_t element = sizeof(T), D = std::int64_t(shape.width), x = tokens * D * element;
    const std::int64_t tp = mesh.size(Axis::tp), sp = mesh.size(Axis::sp), pp = mesh.size(Axis::pp);
    const int stages = schedule.stages(), me = mesh.at(Axis::pp);
    std::int64_t layers = 0, borders = 0;
    for (int s = 0; s < stages; ++s) {
        const bool here = schedule.owner[s] == me;
        if (here) layers += std::int64_t(shard_of(shape.layers, stages, s).length);
        if (s > 0 && schedule.owner[s - 1] != schedule.owner[s])
            borders += here + (schedule.owner[s - 1] == me);
    }
    const bool first = schedule.owner.front() == me, last = schedule.owner.back() == me;

    Bytes bytes;  // times the ranks of the line
    const auto add = [&](Axes axes, std::int64_t times_ranks) {
        if (times_ranks > 0) bytes[axes.name()] += times_ranks;
    };
    add(Axis::tp,
        (tp - 1) * (8 * layers + 2 * first + 2 * last) * x + last * 2 * (tp - 1) * 3 * tokens * element);
    if (const std::int64_t ep = mesh.size(Axis::ep), E = std::int64_t(shape.experts); E && ep > 1) {
        const std::int64_t others = E - std::int64_t(experts_of(E, ep, mesh.at(Axis::ep)).length);
        const std::int64_t even = 2 * layers * tokens * std::int64_t(shape.experts_per_token) * (ep - 1);
        const std::int64_t rows = model.rows_moved() ? ep * *model.rows_moved() : even;
        add(Axis::ep, ep * others * 8 * layers * schedule.micro_batches + 2 * rows * D * element);
    }
    add(Axis::sp, sp * 3 * (sp - 1) * layers * 2 * x / tp);
    add(Axis::pp, pp * borders * x + 2 * (pp - 1) * element);
    add(token_axes, 2 * (mesh.along(token_axes).size() - 1) * (8 + element));
    for (const Placed& p : model.parameters()) {
        const std::int64_t size = std::int64_t(p.size()) * element;
        add(p.summed(), 2 * (mesh.along(p.summed()).size() - 1) * size);
        if (p.tied) add(Axis::pp, pp * size);
    }
    return bytes;
}

}  // namespace fived
