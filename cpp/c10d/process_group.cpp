#include "process_group.hpp"

#include <algorithm>
#include <numeric>

#include "backend.hpp"

namespace fived {

c10::intrusive_ptr<c10d::ProcessGroup> process_group(const std::string& name, const std::vector<int>& ranks,
                                                     std::chrono::milliseconds timeout) {
    int me = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    const int rank = int(std::ranges::find(ranks, me) - ranks.begin()), size = int(ranks.size());
    const auto backend = c10::make_intrusive<MpiBackend>(rank, size, name, ranks, timeout);
    // A ProcessGroup only forwards: to the one backend that each kind of device has.
    auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, size);
    group->setBackend(c10::kCPU, c10d::ProcessGroup::CUSTOM, backend);
    group->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
    return group;
}

c10::intrusive_ptr<c10d::ProcessGroup> world_process_group(const std::string& name,
                                                           std::chrono::milliseconds timeout) {
    int size = 1;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    std::vector<int> all(static_cast<std::size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    return process_group(name, all, timeout);
}

}  // namespace fived
