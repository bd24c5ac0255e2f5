// The process group with no Python: what a stand-alone binary trains on.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace fived {

/// All ranks of MPI_COMM_WORLD; errors say `name`. Collective. MPI must run with MPI_THREAD_MULTIPLE. Throws
/// std::invalid_argument as MpiBackend does.
c10::intrusive_ptr<c10d::ProcessGroup> world_process_group(
    const std::string& name = "world", std::chrono::milliseconds timeout = std::chrono::minutes(10));

}  // namespace fived
