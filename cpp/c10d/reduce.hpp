// Sums and their like over any of torch's types: the arithmetic of a reduction, nothing of its messages.
#pragma once

#include <c10/core/ScalarType.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "fived/mpi/shared_memory.hpp"

namespace fived {

/// The kernel for a type and an operation. Half types are added in float, however many terms there are, and rounded
/// once; bools are sets of one bit: their sum is "or", their product "and". Throws std::invalid_argument, naming both,
/// where there is no such thing.
Reduce reduction(c10::ScalarType type, c10d::ReduceOp::RedOpType op);

}  // namespace fived
