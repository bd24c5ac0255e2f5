// Matrix products on row-major views, done by whichever BLAS CMake found (its Fortran interface, which all
// have).
#pragma once

#include <algorithm>
#include <climits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "fived/math/matrix.hpp"

#ifndef FIVED_BLAS_PREFIX
#define FIVED_BLAS_PREFIX
#endif
#define FIVED_JOIN_(a, b) a##b
#define FIVED_JOIN(a, b) FIVED_JOIN_(a, b)
#define FIVED_BLAS(name) FIVED_JOIN(FIVED_BLAS_PREFIX, name)

extern "C" {
void FIVED_BLAS(sgemm_)(const char*, const char*, const int*, const int*, const int*, const float*,
                        const float*, const int*, const float*, const int*, const float*, float*, const int*);
void FIVED_BLAS(dgemm_)(const char*, const char*, const int*, const int*, const int*, const double*,
                        const double*, const int*, const double*, const int*, const double*, double*,
                        const int*);
// Only OpenBLAS has these; elsewhere they are null.
__attribute__((weak)) void FIVED_BLAS(openblas_set_num_threads)(int);
__attribute__((weak)) int FIVED_BLAS(openblas_get_num_threads)();
}

namespace fived {

/// A matrix of a product, as it is or transposed: gemm(x, t(w), y).
template <class T>
struct Factor {
    MatrixView<const T> matrix;
    bool transposed = false;

    Factor(MatrixView<const T> matrix, bool transposed = false) : matrix(matrix), transposed(transposed) {}
    Factor(MatrixView<T> matrix) : matrix(matrix) {}
    std::size_t rows() const { return transposed ? matrix.columns : matrix.rows; }
    std::size_t columns() const { return transposed ? matrix.rows : matrix.columns; }
};

template <class T>
Factor<std::remove_const_t<T>> t(MatrixView<T> matrix) {
    return {MatrixView<const T>(matrix), true};
}

/// c = a b + beta c. Raises std::invalid_argument when the shapes do not match or exceed BLAS's 2^31.
template <class T>
void gemm(std::type_identity_t<Factor<T>> a, std::type_identity_t<Factor<T>> b, MatrixView<T> c, T beta = 0) {
    const auto shape = [](std::size_t m, std::size_t n) {
        return "[" + std::to_string(m) + ", " + std::to_string(n) + "]";
    };
    if (a.columns() != b.rows() || a.rows() != c.rows || b.columns() != c.columns)
        throw std::invalid_argument("gemm: " + shape(a.rows(), a.columns()) + " times " +
                                    shape(b.rows(), b.columns()) + " into " + shape(c.rows, c.columns));
    if (std::max({c.rows, a.matrix.stride, b.matrix.stride, c.stride}) > INT_MAX)
        throw std::invalid_argument("gemm: a length of " + shape(c.rows, c.columns) + " exceeds 2^31 - 1");
    if (c.rows == 0 || c.columns == 0) return;
    // BLAS counts by columns: it sees each matrix transposed, and c' = b' a'.
    const char op_a = a.transposed ? 'T' : 'N', op_b = b.transposed ? 'T' : 'N';
    const int m = int(c.columns), n = int(c.rows), k = int(a.columns());
    const int ldb = std::max(1, int(b.matrix.stride)), lda = std::max(1, int(a.matrix.stride)),
              ldc = int(c.stride);
    const T one = 1;
    if constexpr (std::is_same_v<T, float>)
        FIVED_BLAS(sgemm_)(&op_b, &op_a, &m, &n, &k, &one, b.matrix.data, &ldb, a.matrix.data, &lda, &beta,
                           c.data, &ldc);
    else
        FIVED_BLAS(dgemm_)(&op_b, &op_a, &m, &n, &k, &one, b.matrix.data, &ldb, a.matrix.data, &lda, &beta,
                           c.data, &ldc);
}

/// Threads of the BLAS; nothing happens, and 0 is returned, for one that is not OpenBLAS (it reads
/// OMP_NUM_THREADS).
inline void set_blas_threads(int n) {
    if (FIVED_BLAS(openblas_set_num_threads)) FIVED_BLAS(openblas_set_num_threads)(n);
}
inline int blas_threads() {
    return FIVED_BLAS(openblas_get_num_threads) ? FIVED_BLAS(openblas_get_num_threads)() : 0;
}

}  // namespace fived
