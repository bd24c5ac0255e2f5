// Ring all-reduce: in round t rank r passes chunk r - t on and adds to chunk r - t - 1; then chunks go around.
#include <mpi.h>

#include <vector>

/// The sum of x over the ranks of comm, on every rank.
std::vector<double> ring_all_reduce(const std::vector<double>& x, MPI_Comm comm) {
    int n = 0, r = 0;
    MPI_Comm_size(comm, &n), MPI_Comm_rank(comm, &r);
    const auto begin = [&](int chunk) { return x.size() * std::size_t(chunk) / std::size_t(n); };
    const auto length = [&](int chunk) { return int(begin(chunk + 1) - begin(chunk)); };
    std::vector<double> total = x, received(x.size());
    const auto pass = [&](int chunk, int next) {
        MPI_Sendrecv(&total[begin(chunk)], length(chunk), MPI_DOUBLE, (r + 1) % n, 0, received.data(),
                     length(next), MPI_DOUBLE, (r + n - 1) % n, 0, comm, MPI_STATUS_IGNORE);
    };
    for (int t = 0; t < n - 1; ++t) {
        const int next = (r - t - 1 + 2 * n) % n;
        pass((r - t + n) % n, next);
        for (int i = 0; i < length(next); ++i)
            total[begin(next) + std::size_t(i)] += received[std::size_t(i)];
    }
    for (int t = 0; t < n - 1; ++t) {
        const int next = (r - t + n) % n;
        pass((r + 1 - t + n) % n, next);
        for (int i = 0; i < length(next); ++i) total[begin(next) + std::size_t(i)] = received[std::size_t(i)];
    }
    return total;
}
