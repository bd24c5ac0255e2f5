// Errors on which all ranks agree, so that none waits for another that has given up.
#pragma once

#include <string>

#include "fived/error.hpp"
#include "fived/mpi/mpi.hpp"

namespace fived {

/// Thrown on all ranks together. The first rank with a problem has the text, the others have none.
class AgreedError : public UsageError {
  public:
    using UsageError::UsageError;
};

/// Throws AgreedError if any rank has a problem. Collective.
inline void agree(const Communicator& world, const std::string& problem) {
    const int first = world.all_reduce(problem.empty() ? world.size() : world.rank(), MPI_MIN);
    if (first < world.size()) throw AgreedError(first == world.rank() ? problem : "");
}

/// Calls `work`; a UsageError of any rank becomes an AgreedError of all. Collective.
template <class Work>
void agreed(const Communicator& world, Work work) {
    std::string problem;
    try {
        work();
    } catch (const UsageError& error) {
        problem = error.what();
    }
    agree(world, problem);
}

}  // namespace fived
