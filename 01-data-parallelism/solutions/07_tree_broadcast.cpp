// Broadcast along a binomial tree: in each round the ranks that have the vector are twice as many.
#include <mpi.h>

#include <vector>

/// Copies x of rank 0 to x of all ranks; all have the same length.
void broadcast(std::vector<double>& x, MPI_Comm comm) {
    int n = 0, r = 0;
    MPI_Comm_size(comm, &n), MPI_Comm_rank(comm, &r);
    for (int have = 1; have < n; have *= 2) {
        if (r < have && r + have < n) MPI_Send(x.data(), int(x.size()), MPI_DOUBLE, r + have, 0, comm);
        if (have <= r && r < 2 * have)
            MPI_Recv(x.data(), int(x.size()), MPI_DOUBLE, r - have, 0, comm, MPI_STATUS_IGNORE);
    }
}
