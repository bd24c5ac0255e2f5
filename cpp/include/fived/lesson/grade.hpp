// Vocabulary of an exercise's targets in C++: claims that are tried in order, and messages counted by MPI's profiling
// interface. Include it in the targets file alone: it defines MPI's functions anew.
//
//     int main(int argc, char** argv) {
//         return fived::grade::run(argc, argv, {{"every rank has the sum", {1, 2, 3}, the_sum}, ...});
//     }
//
// A target runs on the first ranks of the world, once for each number of ranks; a missed one throws Wrong. Rank 0 prints
// one line of JSON at the end: how many targets were met, and what was wrong.
#pragma once

#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace fived::grade {

struct Wrong : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Messages that the answer has sent since the last reset, and their bytes.
struct Sent {
    long messages = 0, bytes = 0;
};
inline Sent sent;
/// The call in which this rank waits, for the report of a hang.
inline std::atomic<const char*> call{nullptr};
inline std::atomic<int> peer{-1};

struct Inside {
    Inside(const char* name, int other) { peer = other, call = name; }
    ~Inside() { call = nullptr; }
};

inline void count(int elements, MPI_Datatype type, int to) {
    int size = 0;
    PMPI_Type_size(type, &size);
    if (to != MPI_PROC_NULL) ++sent.messages, sent.bytes += long(elements) * size;
}

using Numbers = std::vector<double>;

/// Throws Wrong, with the first wrong element, unless |got - want| <= tolerance times the largest of want.
inline void same(const std::string& name, const Numbers& got, const Numbers& want, double tolerance = 1e-12) {
    if (got.size() != want.size())
        throw Wrong(name + " has " + std::to_string(got.size()) + " elements, " +
                    std::to_string(want.size()) + " are needed");
    double largest = 0;
    for (double x : want) largest = std::max(largest, std::abs(x));
    std::size_t wrong = 0, first = 0;
    for (std::size_t i = want.size(); i-- > 0;)
        if (!(std::abs(got[i] - want[i]) <= tolerance * largest)) ++wrong, first = i;
    if (!wrong) return;
    char text[256];
    std::snprintf(text, sizeof text,
                  " is wrong in %zu of %zu elements; the first, [%zu], is %.6g, %.6g is right", wrong,
                  want.size(), first, got[first], want[first]);
    throw Wrong(name + text);
}

/// Throws Wrong unless the counts are equal.
inline void exactly(const std::string& name, long got, long want) {
    if (got != want)
        throw Wrong(name + ": " + std::to_string(got) + ", exactly " + std::to_string(want) + " is needed");
}

/// The numbers of each rank, random, the same wherever they are made: x[rank][i].
inline std::vector<Numbers> random_of(int ranks, std::size_t length, std::mt19937_64& rng) {
    std::normal_distribution<double> normal;
    std::vector<Numbers> x(ranks, Numbers(length));
    for (Numbers& row : x)
        for (double& value : row) value = normal(rng);
    return x;
}

struct Target {
    std::string name;
    std::vector<int> ranks;
    std::function<void(MPI_Comm, std::mt19937_64&)> check;
};

/// Ends the program with the place of this rank once `seconds` have passed.
inline void watch(int rank, double seconds) {
    std::thread([=] {
        std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
        const char* name = call;
        if (name)
            std::printf("\nrank %d waits in %s with rank %d of the communicator\n", rank, name, int(peer));
        else
            std::printf("\nrank %d waits for no message\n", rank);
        std::fflush(stdout);
        std::this_thread::sleep_for(std::chrono::milliseconds(500));  // the others say where they are, too
        _exit(3);
    }).detach();
}

inline std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') out += '\\';
        out += c == '\n' ? ' ' : c;
    }
    return out + "\"";
}

/// Tries the targets. Arguments of the program: seed, seconds to wait, the word that begins the grader's lines.
inline int run(int argc, char** argv, const std::vector<Target>& targets) {
    MPI_Init(&argc, &argv);
    int rank = 0, world = 0;
    PMPI_Comm_rank(MPI_COMM_WORLD, &rank), PMPI_Comm_size(MPI_COMM_WORLD, &world);
    watch(rank, std::stod(argv[2]));
    std::string wrong;
    std::size_t met = 0;
    for (; met < targets.size() && wrong.empty(); ++met) {
        for (int size : targets[met].ranks) {
            std::mt19937_64 rng(std::stoull(argv[1]) * 1000003 + met * 101 + std::size_t(size));
            MPI_Comm comm;
            PMPI_Comm_split(MPI_COMM_WORLD, rank < size ? 0 : MPI_UNDEFINED, rank, &comm);
            char said[512] = "";
            if (rank < size) try {
                    sent = {};
                    targets[met].check(comm, rng);
                } catch (const Wrong& e) {
                    const std::string where =
                        "on " + std::to_string(size) + " ranks, rank " + std::to_string(rank) + ": ";
                    std::strncpy(said, ((size > 1 ? where : "") + e.what()).c_str(), sizeof said - 1);
                } catch (const std::exception& e) {
                    std::strncpy(said, *e.what() ? e.what() : "an exception without a text", sizeof said - 1);
                } catch (...) {
                    std::strncpy(said, "an exception that is no std::exception", sizeof said - 1);
                }
            if (said[0]) {  // others may hang
                std::printf("\n%s missed %zu %s\n", argv[3], met, said);
                std::fflush(stdout);
            }
            std::vector<char> all(sizeof said * std::size_t(world));
            PMPI_Allgather(said, sizeof said, MPI_CHAR, all.data(), sizeof said, MPI_CHAR, MPI_COMM_WORLD);
            for (int r = world; r-- > 0;)
                if (all[r * sizeof said]) wrong = &all[r * sizeof said];
            if (rank < size) PMPI_Comm_free(&comm);
            if (!wrong.empty()) break;
        }
        if (!wrong.empty()) break;
    }
    if (rank == 0) std::printf("\n%s {\"met\": %zu, \"wrong\": %s}\n", argv[3], met, quoted(wrong).c_str());
    MPI_Finalize();
    return 0;
}

}  // namespace fived::grade

extern "C" {
inline int graded_send(const char* name, int n, MPI_Datatype type, int to, const std::function<int()>& call) {
    fived::grade::count(n, type, to);
    fived::grade::Inside inside(name, to);
    return call();
}
int MPI_Send(const void* x, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm) {
    return graded_send("MPI_Send", n, type, to, [&] { return PMPI_Send(x, n, type, to, tag, comm); });
}
int MPI_Ssend(const void* x, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm) {
    return graded_send("MPI_Ssend", n, type, to, [&] { return PMPI_Ssend(x, n, type, to, tag, comm); });
}
int MPI_Isend(const void* x, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request) {
    return graded_send("MPI_Isend", n, type, to,
                       [&] { return PMPI_Isend(x, n, type, to, tag, comm, request); });
}
int MPI_Recv(void* x, int n, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Status* status) {
    fived::grade::Inside inside("MPI_Recv", from);
    return PMPI_Recv(x, n, type, from, tag, comm, status);
}
int MPI_Sendrecv(const void* x, int n, MPI_Datatype type, int to, int tag, void* y, int m, MPI_Datatype other,
                 int from, int tag2, MPI_Comm comm, MPI_Status* status) {
    fived::grade::count(n, type, to);
    fived::grade::Inside inside("MPI_Sendrecv", from);
    return PMPI_Sendrecv(x, n, type, to, tag, y, m, other, from, tag2, comm, status);
}
int MPI_Wait(MPI_Request* request, MPI_Status* status) {
    fived::grade::Inside inside("MPI_Wait", -1);
    return PMPI_Wait(request, status);
}
int MPI_Waitall(int n, MPI_Request* requests, MPI_Status* statuses) {
    fived::grade::Inside inside("MPI_Waitall", -1);
    return PMPI_Waitall(n, requests, statuses);
}
int MPI_Allreduce(const void* x, void* y, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
    ++fived::grade::sent.messages;
    fived::grade::Inside inside("MPI_Allreduce", -1);
    return PMPI_Allreduce(x, y, n, type, op, comm);
}
}
