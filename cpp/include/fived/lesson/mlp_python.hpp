// The parameters of an MLP as numpy arrays by name.
#pragma once

#include <algorithm>
#include <map>
#include <string>

#include "fived/lesson/python.hpp"
#include "fived/math/mlp.hpp"

namespace fived {

/// The numbers as T; TypeError when they cannot be (complex numbers, strings).
template <class T>
Array<T> converted(const py::array& values) {
    const Array<T> result = Array<T>::ensure(values);
    if (!result)
        throw py::type_error("an array of " + std::string(py::str(values.dtype())) +
                             " where floats are needed");
    return result;
}

inline bool is_bias(const Parameter& p) {
    return p.name.ends_with("bias");
}

/// Copies of what lies in a flat array.
template <class T>
py::dict named_arrays(std::span<const Parameter> parameters, std::span<const T> flat) {
    py::dict named;
    for (const Parameter& p : parameters) {
        py::array_t<T> copy(p.size(), flat.data() + p.offset);
        named[p.name.c_str()] = is_bias(p) ? copy : py::array_t<T>(copy.reshape({p.rows, p.columns}));
    }
    return named;
}

/// The other way. Raises ValueError where one is missing or has another shape; those of other names are left out.
template <class T>
void set_named(std::span<const Parameter> parameters, const std::map<std::string, py::array>& named,
               std::span<T> flat) {
    for (const Parameter& p : parameters) {
        const auto found = named.find(p.name);
        if (found == named.end()) throw std::invalid_argument("no weights for " + p.name);
        const Array<T> values = converted<T>(found->second);
        const bool fits = is_bias(p) ? values.ndim() == 1 && std::size_t(values.size()) == p.size()
                                     : values.ndim() == 2 && values.shape(0) == py::ssize_t(p.rows) &&
                                           values.shape(1) == py::ssize_t(p.columns);
        if (!fits)
            throw std::invalid_argument(p.name + " is " + std::to_string(p.rows) + " x " +
                                        std::to_string(p.columns) + "; given are " +
                                        std::to_string(values.size()) + " elements of another shape");
        std::ranges::copy(readable(values), flat.begin() + p.offset);
    }
}

}  // namespace fived
