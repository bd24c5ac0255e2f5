// The life of MPI in a program.
#pragma once

#include <fcntl.h>
#include <mpi.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <string_view>

namespace fived {

/// Removes what killed ranks of this user left in /dev/shm: Open MPI's segments, 16 MB per rank, and our own. The system
/// grants a lease only on a file that no process has open or mapped. One rank per host looks.
inline void remove_dead_segments() {
#ifdef F_SETLEASE  // Linux's alone
    const char* local_rank = std::getenv("OMPI_COMM_WORLD_LOCAL_RANK");
    if (local_rank == nullptr) local_rank = std::getenv("MPI_LOCALRANKID");  // MPICH
    if (local_rank == nullptr || std::string_view(local_rank) != "0") return;
    using Entries = std::filesystem::directory_iterator;
    std::error_code error;  // ends the loop
    for (Entries entry("/dev/shm", error); entry != Entries(); entry.increment(error)) {
        const std::string name = entry->path().filename();
        if (!name.starts_with("sm_segment.") && !name.starts_with("vader_segment.") &&
            !name.starts_with("fived-"))
            continue;
        const int file = open(entry->path().c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
        if (file < 0) continue;
        struct stat owner = {};
        // SIGURG: another process that opens the file meanwhile must not end this one with SIGIO
        if (fstat(file, &owner) == 0 && owner.st_uid == geteuid() && fcntl(file, F_SETSIG, SIGURG) == 0 &&
            fcntl(file, F_SETLEASE, F_WRLCK) == 0)
            unlink(entry->path().c_str());
        close(file);
    }
#endif
}

/// MPI_Init to MPI_Finalize. Ends the whole world when an exception leaves its scope.
class Environment {
  public:
    /// `threads`: MPI_THREAD_MULTIPLE where a process group has a thread of its own.
    Environment(int& argc, char**& argv, int threads = MPI_THREAD_FUNNELED) {
        remove_dead_segments();
        int provided = 0;
        MPI_Init_thread(&argc, &argv, threads, &provided);
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    }
    ~Environment() {
        if (std::uncaught_exceptions() > 0) MPI_Abort(MPI_COMM_WORLD, 1);
        MPI_Finalize();
    }
    Environment(const Environment&) = delete;
    Environment& operator=(const Environment&) = delete;
};

}  // namespace fived
