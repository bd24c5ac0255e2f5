// The life of MPI in a program.
#pragma once

#include <mpi.h>

#include <exception>

namespace fived {

/// MPI_Init to MPI_Finalize. Ends the whole world when an exception leaves its scope.
class Environment {
  public:
    /// `threads`: MPI_THREAD_MULTIPLE where a process group has a thread of its own.
    Environment(int& argc, char**& argv, int threads = MPI_THREAD_FUNNELED) {
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
