// The process group with no Python: what a stand-alone binary trains on.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace fived {

/// These ranks of MPI_COMM_WORLD, in order; errors say `name`. Collective over them. MPI must run with MPI_THREAD_MULTIPLE.
/// Throws std::invalid_argument as MpiBackend does.
c10::intrusive_ptr<c10d::ProcessGroup> process_group(
    const std::string& name, const std::vector<int>& ranks,
    std::chrono::milliseconds timeout = std::chrono::minutes(10));
/// All of them.
c10::intrusive_ptr<c10d::ProcessGroup> world_process_group(
    const std::string& name = "world", std::chrono::milliseconds timeout = std::chrono::minutes(10));

}  // namespace fived
