// Row-parallel product: a part of the sum on each rank, completed by one all-reduce; backward is local.
#include <mpi.h>

#include <utility>
#include <vector>

using Matrix = std::vector<double>;

/// y_ND, complete on every rank.
Matrix row_parallel(const Matrix& x_Nf, const Matrix& w_fD, int N, int f, int D, MPI_Comm comm) {
    Matrix y_ND(N * D);
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < f; ++i)
            for (int d = 0; d < D; ++d) y_ND[n * D + d] += x_Nf[n * f + i] * w_fD[i * D + d];
    MPI_Allreduce(MPI_IN_PLACE, y_ND.data(), N * D, MPI_DOUBLE, MPI_SUM, comm);
    return y_ND;
}

/// {dx_Nf, dw_fD} of this rank.
std::pair<Matrix, Matrix> row_parallel_backward(const Matrix& dy_ND, const Matrix& x_Nf, const Matrix& w_fD,
                                                int N, int f, int D, MPI_Comm) {
    Matrix dx_Nf(N * f), dw_fD(f * D);
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < f; ++i)
            for (int d = 0; d < D; ++d) {
                dx_Nf[n * f + i] += dy_ND[n * D + d] * w_fD[i * D + d];
                dw_fD[i * D + d] += x_Nf[n * f + i] * dy_ND[n * D + d];
            }
    return {dx_Nf, dw_fD};
}
