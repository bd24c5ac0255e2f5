// Parameters by name, as common/models/transformer.py names them.
#pragma once

#include <torch/types.h>

#include <map>
#include <stdexcept>
#include <string>

namespace fived {

/// "attention.q_proj.weight", ...
using Parameters = std::map<std::string, at::Tensor>;

/// The parameter of that name. Throws std::invalid_argument when there is none.
inline const at::Tensor& find(const Parameters& parameters, const std::string& name) {
    const auto found = parameters.find(name);
    if (found == parameters.end())
        throw std::invalid_argument("no parameter " + name + " among the " +
                                    std::to_string(parameters.size()) + " given");
    return found->second;
}

}  // namespace fived
