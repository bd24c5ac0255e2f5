// The types of arithmetic.
//
// Another one (bfloat16, say) is a value here and in with_type(), a gemm() in math/blas.hpp, a datatype in mpi/mpi.hpp and
// an instantiation at the end of each chapter's .cpp; on LibTorch it is a value here and in torch_type() of
// torch/training.hpp.
#pragma once

#include <array>

#include "fived/named.hpp"

namespace fived {

enum class Dtype { float64, float32 };
constexpr auto names(Dtype) {
    return std::array{"float64", "float32"};
}

/// run.operator()<double>() or run.operator()<float>(): the one place where a Dtype becomes a type.
template <class Run>
auto with_type(Dtype dtype, Run run) {
    return dtype == Dtype::float64 ? run.template operator()<double>() : run.template operator()<float>();
}

}  // namespace fived
