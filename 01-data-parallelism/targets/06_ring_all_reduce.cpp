// Targets of the ring all-reduce in C++: sums of uneven chunks, x kept, messages and bytes counted.
// allowed: MPI_Comm_size MPI_Comm_rank MPI_Send MPI_Recv MPI_Isend MPI_Irecv MPI_Wait MPI_Waitall MPI_Sendrecv
#include "fived/lesson/grade.hpp"

using namespace fived::grade;

std::vector<double> ring_all_reduce(const std::vector<double>& x, MPI_Comm comm);

namespace {

Numbers sum(const std::vector<Numbers>& x) {
    Numbers total(x[0].size());
    for (const Numbers& row : x)
        for (std::size_t i = 0; i < row.size(); ++i) total[i] += row[i];
    return total;
}

void the_sum(MPI_Comm comm, std::mt19937_64& rng) {
    int n = 0, r = 0;
    PMPI_Comm_size(comm, &n), PMPI_Comm_rank(comm, &r);
    for (std::size_t length : {12, 13, 2}) {
        const auto x = random_of(n, length, rng);
        same("the result for length " + std::to_string(length), ring_all_reduce(x[r], comm), sum(x));
    }
}

void messages(MPI_Comm comm, std::mt19937_64& rng) {
    int n = 0, r = 0;
    PMPI_Comm_size(comm, &n), PMPI_Comm_rank(comm, &r);
    const auto x = random_of(n, 12, rng);
    sent = {};
    const Numbers total = ring_all_reduce(x[r], comm);
    exactly("messages that it sends", sent.messages, 2 * (n - 1));
    exactly("bytes that it sends", sent.bytes, 2 * (n - 1) * 12 * 8 / n);
    same("the result", total, sum(x));
}

}  // namespace

int main(int argc, char** argv) {
    return run(argc, argv,
               {
                   {"every rank has the sum", {1, 2, 3, 4}, the_sum},
                   {"2(n-1) messages of 1/n of x", {2, 3, 4}, messages},
               });
}
