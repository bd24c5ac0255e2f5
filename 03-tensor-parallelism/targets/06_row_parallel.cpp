// Targets of the row-parallel product in C++: values beside the serial product, calls counted.
// allowed: MPI_Comm_size MPI_Comm_rank MPI_Allreduce
#include <utility>

#include "fived/lesson/grade.hpp"

using namespace fived::grade;

Numbers row_parallel(const Numbers& x_Nf, const Numbers& w_fD, int N, int f, int D, MPI_Comm comm);
std::pair<Numbers, Numbers> row_parallel_backward(const Numbers& dy_ND, const Numbers& x_Nf,
                                                  const Numbers& w_fD, int N, int f, int D, MPI_Comm comm);

namespace {

constexpr int N = 5, F = 11, D = 3;

struct Case {
    Numbers x_NF, w_FD, dy_ND, x_Nf, w_fD;
    int begin = 0, f = 0;
};

Case make(MPI_Comm comm, std::mt19937_64& rng) {
    int n = 0, r = 0;
    PMPI_Comm_size(comm, &n), PMPI_Comm_rank(comm, &r);
    Case c{random_of(1, N * F, rng)[0], random_of(1, F * D, rng)[0], random_of(1, N * D, rng)[0], {}, {}};
    c.begin = F * r / n, c.f = F * (r + 1) / n - c.begin;
    for (int i = 0; i < N; ++i)
        for (int j = 0; j < c.f; ++j) c.x_Nf.push_back(c.x_NF[i * F + c.begin + j]);
    c.w_fD.assign(c.w_FD.begin() + c.begin * D, c.w_FD.begin() + (c.begin + c.f) * D);
    return c;
}

void forward(MPI_Comm comm, std::mt19937_64& rng) {
    const Case c = make(comm, rng);
    Numbers want(N * D), part(N * D);
    for (int i = 0; i < N; ++i)
        for (int j = 0; j < F; ++j)
            for (int d = 0; d < D; ++d) {
                const double term = c.x_NF[i * F + j] * c.w_FD[j * D + d];
                want[i * D + d] += term;
                if (j >= c.begin && j < c.begin + c.f) part[i * D + d] += term;
            }
    const Numbers got = row_parallel(c.x_Nf, c.w_fD, N, c.f, D, comm);
    if (got.size() == part.size() && c.f < F && std::abs(got[0] - part[0]) < 1e-12)
        throw Wrong("y is this rank's part of the sum; the parts of the other ranks are missing");
    same("y", got, want);
}

void backward(MPI_Comm comm, std::mt19937_64& rng) {
    const Case c = make(comm, rng);
    Numbers dx(N * c.f), dw(c.f * D);
    for (int i = 0; i < N; ++i)
        for (int j = 0; j < c.f; ++j)
            for (int d = 0; d < D; ++d) {
                dx[i * c.f + j] += c.dy_ND[i * D + d] * c.w_fD[j * D + d];
                dw[j * D + d] += c.x_Nf[i * c.f + j] * c.dy_ND[i * D + d];
            }
    const auto [got_dx, got_dw] = row_parallel_backward(c.dy_ND, c.x_Nf, c.w_fD, N, c.f, D, comm);
    same("dx", got_dx, dx);
    same("dw", got_dw, dw);
}

void calls(MPI_Comm comm, std::mt19937_64& rng) {
    const Case c = make(comm, rng);
    sent = {};
    const Numbers y = row_parallel(c.x_Nf, c.w_fD, N, c.f, D, comm);
    exactly("all-reduces in the forward pass", sent.messages, 1);
    sent = {};
    row_parallel_backward(c.dy_ND, c.x_Nf, c.w_fD, N, c.f, D, comm);
    exactly("all-reduces in the backward pass", sent.messages, 0);
}

}  // namespace

int main(int argc, char** argv) {
    return run(argc, argv,
               {
                   {"y is complete on every rank", {1, 2, 3, 4}, forward},
                   {"dx and dw", {1, 2, 3}, backward},
                   {"one all-reduce forward, none backward", {2, 4}, calls},
               });
}
