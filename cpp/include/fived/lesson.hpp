// What every lesson's main() does: agree on the options, run, turn errors into one line and an exit code.
#pragma once

#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>

#include "fived/environment.hpp"
#include "fived/error.hpp"
#include "fived/mpi.hpp"
#include "fived/options.hpp"

namespace fived {

inline bool given(int argc, char** argv, std::string_view option) {
    return std::find(argv + 1, argv + argc, option) != argv + argc;
}

/// Runs `prepare` (parse, read, check: no communication) on every rank, then `body`, which returns whether
/// all was right. Exit codes: 0 right; 1 wrong, or an error that ends all ranks; 2 unusable input, said once,
/// before any rank communicates. --help prints the options.
template <class Prepare, class Body>
int run_lesson(const Communicator& world, const std::string& name, int argc, char** argv,
               const Options& options, Prepare prepare, Body body) {
    if (given(argc, argv, "--help")) {
        if (world.rank() == 0) std::fputs(options.help().c_str(), stdout);
        return 0;
    }
    std::string problem;
    try {
        options.parse(argc, argv);
        prepare();
    } catch (const UsageError& error) {
        problem = error.what();
    }
    const int first = world.all_reduce(problem.empty() ? world.size() : world.rank(), MPI_MIN);
    if (first < world.size()) {
        if (first == world.rank()) std::fprintf(stderr, "%s: %s\n", name.c_str(), problem.c_str());
        return 2;
    }
    try {
        return body() ? 0 : 1;
    } catch (const std::exception& error) {
        const bool large =
            dynamic_cast<const std::bad_alloc*>(&error) || dynamic_cast<const std::length_error*>(&error);
        std::fprintf(stderr, "%s: rank %d: %s\n", name.c_str(), world.rank(),
                     large ? "there is not enough memory for these sizes" : error.what());
        std::fflush(nullptr);
        MPI_Abort(MPI_COMM_WORLD, 1);
        return 1;
    }
}

}  // namespace fived
