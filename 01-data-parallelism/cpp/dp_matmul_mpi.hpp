// C = A B by MPI: the rows of A, the columns of B, or the inner dimension cut over the ranks.
//
//     C[i, j]  =  sum over k of A[i, k] B[k, j]
//
//              A      B      C            forward sends                  backward sends
//     rows     S(0)   R      S(0)         nothing                        dB, all-reduced
//     columns  R      S(1)   S(1)         nothing                        dA, all-reduced
//     inner    S(1)   S(0)   P -> S(0)    blocks of C, once round        blocks of dC, once round
//
// In `inner` nobody adds matrices. A block of rows of C starts at the rank after the one that it belongs to; each
// rank receives it, adds its own term by the matrix product's beta = 1, and passes it on; at its owner it is whole:
//
//              rank 0         rank 1         rank 2              3 ranks
//     step 0   block 2        block 0        block 1             c  = a b
//     step 1   block 1        block 2        block 0             c += a b, after c came from the left
//     step 2   block 0        block 1        block 2             c += a b, whole
//
// Cost, P ranks, |X| bytes of X: rows and columns 2 (P-1)/P |dB| or |dA| backward; inner (P-1)/P |C| forward and
// backward. Memory beside the pieces: two blocks of C.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "fived/math/blas.hpp"
#include "fived/math/matrix.hpp"
#include "fived/math/product.hpp"
#include "fived/mpi/collectives.hpp"
#include "fived/named.hpp"

namespace fived {

enum class Split { rows, columns, inner };
constexpr auto names(Split) {
    return std::array{"rows", "columns", "inner"};
}

/// A product that is computed again and again: its memory is taken once. `comm` must outlive it.
template <class T>
class SplitProduct {
  public:
    /// `panels`: messages in which a block of C travels. One is computed while the one before is under way.
    SplitProduct(const Communicator& comm, Split split, Shape whole, std::size_t panels = 1);

    /// c = this rank's piece of A B. Collective; all matrices are this rank's pieces, c without gaps.
    /// Raises std::invalid_argument where a piece has another shape.
    void multiply(MatrixView<const T> a, MatrixView<const T> b, MatrixView<T> c);
    /// dA = dC B^T and dB = A^T dC, cut as A and B are; da, db and dc without gaps.
    void gradients(MatrixView<const T> a, MatrixView<const T> b, MatrixView<const T> dc, MatrixView<T> da,
                   MatrixView<T> db);

    /// Bytes that this rank sent in the last call, counted message by message.
    std::size_t bytes_sent() const { return sent_; }
    /// The same by formula, of `multiply` and of `gradients`.
    std::size_t bytes_forward() const;
    std::size_t bytes_backward() const;

    /// Rows and columns of this rank's piece.
    Range rows_of_a() const { return whole_or_piece(whole_.M, split_ == Split::rows); }
    Range columns_of_a() const { return whole_or_piece(whole_.K, split_ == Split::inner); }
    Range rows_of_b() const { return columns_of_a(); }
    Range columns_of_b() const { return whole_or_piece(whole_.J, split_ == Split::columns); }
    Range rows_of_c() const { return whole_or_piece(whole_.M, split_ != Split::columns); }
    Range columns_of_c() const { return columns_of_b(); }

  private:
    Range whole_or_piece(std::size_t n, bool is_cut) const {
        return is_cut ? range(n, comm_.size(), comm_.rank()) : Range{0, n};
    }
    Range block(int rank) const {
        return range(whole_.M, comm_.size(), (rank + comm_.size()) % comm_.size());
    }
    void check(MatrixView<const T> a, MatrixView<const T> b, MatrixView<const T> c) const;
    void pass_c(MatrixView<const T> a, MatrixView<const T> b, MatrixView<T> c);
    void pass_dc(MatrixView<const T> a, MatrixView<const T> b, MatrixView<const T> dc, MatrixView<T> da,
                 MatrixView<T> db);
    /// Room for any block; two, used in turn.
    T* room(int step) { return space_.get() + std::size_t(step % 2) * block_; }

    const Communicator& comm_;
    Split split_;
    Shape whole_;
    std::size_t panels_, block_ = 0, sent_ = 0;
    std::unique_ptr<T[]> space_;
};

}  // namespace fived
