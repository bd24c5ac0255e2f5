// A Transformer layer whose matrices are split over ranks (Megatron-LM: Shoeybi et al., arXiv:1909.08053).
//
//     a = x + attention(norm(x)),  y = a + down(gelu(up(norm(a))))
//
//     every rank has x          column-parallel           row-parallel             every rank has y
//     x_ND ──► norm ──┬──► q, k, v of my heads ──► attend ──► o: a term of z ──► all-reduce ──► + x ──► a
//     a_ND ──► norm ──┬──► up: my columns ───────► gelu ────► down: a term of z ─► all-reduce ──► + a ──► y
//                     └── backward: each rank has a term of the gradient here ──► all-reduce
//
// Between a column-parallel and a row-parallel product nothing is exchanged: a head, and a column of the MLP,
// stays on its rank. The bias of a row-parallel product is added once, after the sum.
//
// Cost: 2 all-reduces of N D numbers forward, 2 backward: a rank sends 4 x 2 (P-1)/P N D numbers a step.
// Weights, gradients and optimizer state of the matrices 1/P; norms, o's and down's biases, and x, a, y
// whole.
//
// S sequence  N tokens  D width  K width of a head  a = h K columns of this rank's h heads
// F width of the MLP  f this rank's part of it
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fived/lesson/record.hpp"
#include "fived/math/optimizer.hpp"
#include "fived/math/shard.hpp"
#include "fived/mpi/collectives.hpp"
#include "fived/mpi/mpi.hpp"
#include "fived/named.hpp"

namespace fived {

struct LayerShape {
    std::size_t width = 1, heads = 1, mlp_width = 1;
    double epsilon = 1e-5;
    std::size_t head_width() const { return width / heads; }
    /// Numbers of all parameters: 4 D^2 + 2 D F and the vectors.
    std::size_t parameters() const { return width * (4 * width + 2 * mlp_width + 9) + mlp_width; }
};

/// How a parameter [rows, columns] is cut over the ranks: rows of a column-parallel matrix (weights are [out, in]), columns
/// of a row-parallel one; in whole heads, or evenly.
enum class Cut { whole, rows_by_heads, columns_by_heads, rows_evenly, columns_evenly };

/// Sums over the ranks by MPI_Allreduce; or by our own ring, whose messages are counted.
enum class Reduction { mpi, ring };
constexpr auto names(Reduction) {
    return std::array{"mpi", "ring"};
}

/// One layer on all ranks of `comm`; serial when comm is null. The weights are those of
/// common/models/transformer.py's layers.0 of one layer: each rank makes its part alone.
template <class T>
class TensorParallelLayer {
  public:
    /// `comm` must outlive this. Throws std::invalid_argument where the heads do not divide the width, or a
    /// rank would get no head or column.
    TensorParallelLayer(const LayerShape& shape, std::uint64_t seed, const Communicator* comm,
                        Reduction reduction = Reduction::mpi);

    /// y_ND from x_ND, the same on every rank; N = samples * sequence.
    void forward(MatrixView<const T> x_ND, std::size_t sequence, MatrixView<T> y_ND);
    /// dx_ND from dy_ND, after the forward of the same x, which must still be there; gradients() are set.
    void backward(MatrixView<const T> dy_ND, MatrixView<T> dx_ND);
    /// 2-norm of the whole layer's gradients: a split one counts where it lies, a replicated one once.
    /// Collective.
    double gradient_norm() const;
    template <class Optimizer>
    void step(Optimizer& optimizer) {
        optimizer.step(std::span<T>(weights_), std::span<const T>(gradients_));
    }

    const LayerShape& shape() const { return shape_; }
    std::span<const Shard> parameters() const { return parameters_; }
    std::span<T> weights() { return weights_; }
    std::span<T> gradients() { return gradients_; }
    /// Bytes this rank sent, and its seconds in the all-reduces, since the last forward began.
    std::size_t bytes_sent() const { return bytes_sent_; }
    double communication_seconds() const { return communication_seconds_; }
    /// Bytes of a forward and backward of N tokens, by formula.
    std::size_t bytes_by_formula(std::size_t tokens) const;
    /// Off: the all-reduces are left out, for the time of the rest alone.
    bool communicate = true;

  private:
    struct Norm {
        std::vector<T> standard_ND, scale_N, y_ND;
    };

    void add_parameter(const std::string& name, std::size_t rows, std::size_t columns, Cut how = Cut::whole);
    void initialise(std::uint64_t seed);
    void reserve(std::size_t tokens, std::size_t sequence);
    void attend();
    void attend_backward();
    void all_reduce(MatrixView<T> terms_ND);
    MatrixView<T> head(std::vector<T>& qkv, std::size_t sample, std::size_t which, std::size_t h);
    MatrixView<T> head(std::vector<T>& attended, std::size_t sample, std::size_t h);
    MatrixView<T> weights_of_head(std::size_t sample, std::size_t h);
    MatrixView<T> tokens(std::vector<T>& work, std::size_t columns) { return {work.data(), N_, columns}; }
    const Shard& named(const std::string& name) const;
    MatrixView<T> matrix(std::vector<T>& flat, const std::string& name);
    std::span<T> vector(std::vector<T>& flat, const std::string& name);
    MatrixView<T> qkv_weight(std::vector<T>& flat);
    std::span<T> qkv_bias(std::vector<T>& flat);

    LayerShape shape_;
    const Communicator* comm_;
    Reduction reduction_;
    std::size_t heads_, a_, f_;  // this rank's heads, their columns h K, and its columns of the MLP
    std::vector<Shard> parameters_;
    std::vector<T> weights_, gradients_;
    std::size_t N_ = 0, S_ = 0;
    MatrixView<const T> x_ND_;
    Norm attention_norm_, mlp_norm_;
    std::vector<T> qkv_, dqkv_, p_, dp_, attended_, dattended_, a_ND_, up_, gelu_, dgelu_, sum_;
    std::size_t bytes_sent_ = 0;
    double communication_seconds_ = 0;
};

}  // namespace fived
