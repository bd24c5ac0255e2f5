// The row-parallel product and its backward pass, in C++.
//
// y = x W, where each rank holds some columns of x and the same rows of W:
//
//     x_NF = [ x of rank 0 | x of rank 1 | ... ]      W_FD = [ W of rank 0 ]      y_ND = sum over ranks of x_Nf w_fD
//                                                            [ W of rank 1 ]
//
// Each rank's product has the full size N x D and is a part of the sum: one all-reduce completes y on every rank. The
// gradient dy of y is complete on every rank, so the backward pass needs no message:
//
//     dx_Nf = dy_ND (w_fD)^T          dw_fD = (x_Nf)^T dy_ND
//
// Matrices are stored by rows: element (i, j) of a matrix with c columns is x[i * c + j]. The ranks' f may differ.
// MPI_Allreduce takes (pointer or MPI_IN_PLACE, result, count, MPI_DOUBLE, MPI_SUM, comm).
//
// Targets: y, dx and dw on 1 to 4 ranks with uneven f; one all-reduce in the forward pass, nothing in the backward pass.
#include <mpi.h>

#include <stdexcept>
#include <utility>
#include <vector>

using Matrix = std::vector<double>;

/// y_ND, complete on every rank.
Matrix row_parallel(const Matrix& x_Nf, const Matrix& w_fD, int N, int f, int D, MPI_Comm comm) {
    (void)x_Nf, (void)w_fD, (void)N, (void)f, (void)D, (void)comm;
    throw std::logic_error("not written: multiply this rank's x_Nf and w_fD, then sum over the ranks");
}

/// {dx_Nf, dw_fD} of this rank.
std::pair<Matrix, Matrix> row_parallel_backward(const Matrix& dy_ND, const Matrix& x_Nf, const Matrix& w_fD,
                                                int N, int f, int D, MPI_Comm comm) {
    (void)dy_ND, (void)x_Nf, (void)w_fD, (void)N, (void)f, (void)D, (void)comm;
    throw std::logic_error("not written: two products with this rank's parts");
}
