// The life of MPI in a program.
#pragma once

#include <mpi.h>

#include <exception>

namespace fived {

/// MPI_Init to MPI_Finalize. Ends the whole world when an exception leaves its scope.
class Environment {
  public:
    Environment(int& argc, char**& argv) {
        int provided = 0;
        MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
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
