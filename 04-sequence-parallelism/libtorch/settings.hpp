// The command line of sp_libtorch, and the numbers that it means.
//
// B batch  S sequence  H query heads  G heads of keys  K width of a head
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "fived/lesson/lesson.hpp"
#include "fived/math/random.hpp"
#include "fived/torch/torch.hpp"
#include "sp_libtorch.hpp"

namespace fived {

struct Settings : LessonSettings {
    std::int64_t batch = 2, heads = 4, kv_heads = 2, sequence = 48, head_width = 16;
    Kernel kernel = Kernel::library;

    /// What --benchmark starts from.
    void prefer_benchmark() {
        batch = 1, heads = kv_heads = 8, sequence = 8192, head_width = 64, dtype = Dtype::float32;
    }
    Options options() {
        Options options("Ring attention on LibTorch and MPI. Run it under mpirun.");
        const std::int64_t one = 1;
        options.add("batch", batch, one, "samples");
        options.add("heads", heads, one, "of the queries");
        options.add("kv-heads", kv_heads, one, "heads of the keys and values; divides --heads");
        options.add("sequence", sequence, one, "positions of all ranks together");
        options.add("head-width", head_width, one, "of one head");
        options.add("kernel", kernel, "of a block, in what is timed");
        add_to(options, "rounds that are timed", "of the numbers", " of each order",
               "time, compare nothing; with --help: its own defaults");
        return options;
    }
    /// Throws UsageError for what cannot work.
    void check(int ranks) const {
        std::string divisors;
        for (std::int64_t g = 1; g <= std::min<std::int64_t>(heads, 1024); ++g)
            if (heads % g == 0) divisors += (g == 1 ? "" : ", ") + std::to_string(g);
        if (heads % kv_heads)
            throw UsageError("--kv-heads " + std::to_string(kv_heads) + " does not divide --heads " +
                             std::to_string(heads) + "; give one of " + divisors);
        const std::int64_t parts = 2 * ranks, below = sequence / parts * parts;
        if (sequence % parts)
            throw UsageError("--sequence " + std::to_string(sequence) + " does not divide into " +
                             std::to_string(parts) + " chunks, two for each rank; " +
                             (below ? std::to_string(below) + " or " : "") + std::to_string(below + parts) +
                             " would");
    }
    at::ScalarType type() const { return dtype == Dtype::float64 ? at::kDouble : at::kFloat; }
};

/// q, k and v, and the weights of the loss, sum(o w).
struct Inputs {
    at::Tensor q, k, v, w;

    /// The whole sequence: numbers by place, the same on all ranks.
    explicit Inputs(const Settings& s) {
        std::uint64_t stream = 0;
        for (at::Tensor* x : {&q, &k, &v, &w}) {
            *x = at::empty({s.batch, x == &k || x == &v ? s.kv_heads : s.heads, s.sequence, s.head_width},
                           at::kDouble);
            double* numbers = x->data_ptr<double>();
            for (std::int64_t i = 0; i < x->numel(); ++i)
                numbers[i] = normal(s.seed, stream, std::uint64_t(i));
            *x = x->to(s.type());
            ++stream;
        }
        start();
    }
    /// A rank's part of it.
    Inputs(const Inputs& whole, const at::Tensor& places) {
        q = whole.q.detach().index_select(2, places), k = whole.k.detach().index_select(2, places);
        v = whole.v.detach().index_select(2, places), w = whole.w.index_select(2, places);
        start();
    }
    /// Wants gradients, and has none yet.
    void start() const {
        for (const at::Tensor& x : {q, k, v}) x.requires_grad_().mutable_grad().reset();
    }
};

}  // namespace fived
