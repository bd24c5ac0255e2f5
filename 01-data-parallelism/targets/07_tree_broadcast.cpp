// Targets of the tree broadcast: the vector everywhere, and the messages of each rank.
// allowed: MPI_Comm_size MPI_Comm_rank MPI_Send MPI_Recv MPI_Isend MPI_Irecv MPI_Wait MPI_Waitall
// ranks: 8
#include "fived/lesson/grade.hpp"

using namespace fived::grade;

void broadcast(std::vector<double>& x, MPI_Comm comm);

namespace {

Numbers sent_by_rank_0(MPI_Comm comm, std::mt19937_64& rng, std::size_t length) {
    int n = 0, r = 0;
    PMPI_Comm_size(comm, &n), PMPI_Comm_rank(comm, &r);
    const auto x = random_of(n, length, rng);
    Numbers mine = x[r];
    sent = {};
    broadcast(mine, comm);
    const std::string name = "x for length " + std::to_string(length);
    if (r > 0 && length > 0 && mine == x[r]) throw Wrong(name + " is unchanged: nothing was received");
    same(name, mine, x[0]);
    return mine;
}

void everywhere(MPI_Comm comm, std::mt19937_64& rng) {
    for (std::size_t length : {5, 1, 1000}) sent_by_rank_0(comm, rng, length);
}

void tree(MPI_Comm comm, std::mt19937_64& rng) {
    int n = 0, r = 0;
    PMPI_Comm_size(comm, &n), PMPI_Comm_rank(comm, &r);
    const Numbers got = sent_by_rank_0(comm, rng, 16);
    long want = 0;
    for (int have = 1; have < n; have *= 2) want += r < have && r + have < n;
    exactly("messages that it sends", sent.messages, want);
    exactly("bytes that it sends", sent.bytes, want * long(got.size()) * 8);
}

}  // namespace

int main(int argc, char** argv) {
    return run(argc, argv,
               {
                   {"all ranks have the vector of rank 0", {1, 2, 3, 5, 8}, everywhere},
                   {"the messages of a binomial tree", {2, 3, 6, 8}, tree},
               });
}
