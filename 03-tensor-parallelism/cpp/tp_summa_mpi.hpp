// C = A B by MPI on a grid of ranks: panels of both factors are broadcast along rows and columns (SUMMA).
//
//     C(r, c)  =  sum over panels p of  A(r, p) B(p, c)          R x C ranks, rank = r C + c
//
//               A            B            C
//             . | p        . | .        + | +       A: M over grid rows, K over grid columns
//             --+--        --+--        --+--       B: K over grid rows, J over grid columns
//             . | p        p | p        + | +       C: M over grid rows, J over grid columns, and it stays
//
//     message   [ panel 0 ][ panel 1 ][ panel 2 ]
//     product              [ panel 0 ][ panel 1 ][ panel 2 ]      time ->
//
// MPI and the memory of a host move data only when they are asked to, so a product stops a few times and asks.
//
// Backward: the same broadcasts; dA(r, p) = dC(r, :) B(p, :)^T is summed along the row to the owner of the panel,
// dB(p, c) = A(:, p)^T dC(:, c) along the column.
//
// Cost, all ranks together: forward (C-1) |A| + (R-1) |B|, backward twice that. A rank holds two panels of A and of
// B beside its blocks. Sizes need not divide: where A and B are cut at different places, each place begins a panel.
// R. van de Geijn and J. Watts, "SUMMA", Concurrency: Practice and Experience 9(4), 1997.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "fived/math/matrix.hpp"
#include "fived/math/product.hpp"
#include "fived/mpi/mpi.hpp"
#include "fived/mpi/shared_memory.hpp"
#include "fived/named.hpp"

namespace fived {

struct GridShape {
    int rows = 1, columns = 1;
};

/// The grid whose sides differ least, rows <= columns.
GridShape most_square(int ranks);

/// What carries a panel: MPI_Ibcast and MPI_Ireduce, or the memory that the ranks of one host share.
enum class Carrier { mpi, host };
constexpr auto names(Carrier) {
    return std::array{"mpi", "host"};
}

/// The ranks of one row or one column. One collective at a time; it goes on whenever test() is called.
class Line {
  public:
    /// Collective. Raises MpiError where `carrier` is host and the ranks are on several.
    Line(Communicator comm, Carrier carrier);

    int rank() const { return comm_.rank(); }
    int size() const { return comm_.size(); }

    /// Begins to bring `data` of `root` to all. Empty data do not travel.
    template <class T>
    void start_broadcast(std::span<T> data, int root);
    /// The sum of all ranks' `data` in place on `root`; the others' may be spoiled.
    template <class T>
    void reduce(std::span<T> data, int root);
    /// True when done.
    bool test();
    void wait();

  private:
    Communicator comm_;
    Request request_;
    std::unique_ptr<HostMemory> memory_;
    std::optional<Rounds> rounds_;
    std::uint64_t calls_ = 0;
};

/// Columns of A that one grid column holds, and rows of B that one grid row holds.
struct Panel {
    Range inner;
    int column, row;
};

/// A product that is computed again and again: its memory is taken once.
template <class T>
class Summa {
  public:
    /// Collective. `panels`: those in which each stretch of K with one owner of A and one of B travels. `overlap`:
    /// broadcast the next panel while one is multiplied. Raises MpiError where the grid is not of `comm`'s size.
    Summa(const Communicator& comm, GridShape grid, Shape whole, std::size_t panels = 1,
          Carrier carrier = Carrier::mpi, bool overlap = true);

    /// c = this rank's block of A B. Collective; all matrices are this rank's blocks without gaps.
    /// Raises std::invalid_argument where a block has another shape.
    void multiply(MatrixView<const T> a, MatrixView<const T> b, MatrixView<T> c);
    /// Blocks of dA = dC B^T and dB = A^T dC, cut as A and B are.
    void gradients(MatrixView<const T> a, MatrixView<const T> b, MatrixView<const T> dc, MatrixView<T> da,
                   MatrixView<T> db);

    /// Bytes of the last call, counted where they begin: a root for each rank that it brings a panel to, and every
    /// rank for a term that it gives to a sum.
    std::size_t bytes_sent() const { return sent_; }
    /// The same by formula, of `multiply` and of `gradients`.
    std::size_t bytes_forward() const;
    std::size_t bytes_backward() const;

    /// Rows and columns of this rank's block.
    Range rows_of_a() const { return rows_of_c(); }
    Range columns_of_a() const { return range(whole_.K, row_.size(), row_.rank()); }
    Range rows_of_b() const { return range(whole_.K, column_.size(), column_.rank()); }
    Range columns_of_b() const { return columns_of_c(); }
    Range rows_of_c() const { return range(whole_.M, column_.size(), column_.rank()); }
    Range columns_of_c() const { return range(whole_.J, row_.size(), row_.rank()); }

  private:
    struct Factors {
        MatrixView<const T> a, b;
    };
    void cut_panels(std::size_t each);
    void check(MatrixView<const T> a, MatrixView<const T> b, MatrixView<const T> c) const;
    Factors start(std::size_t p, MatrixView<const T> a, MatrixView<const T> b);
    void reduce(Line& line, int owner, MatrixView<T> term, MatrixView<T> own);

    Shape whole_;
    bool overlap_;
    Line row_, column_;
    std::vector<Panel> panels_;
    std::array<std::unique_ptr<T[]>, 2> room_a_, room_b_;
    std::size_t sent_ = 0;
};

}  // namespace fived
