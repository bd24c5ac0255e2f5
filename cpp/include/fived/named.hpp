// Enumerations whose values have names. Code compares values; text occurs only where a command line or Python gives it.
//
//     enum class Order { contiguous, zigzag };
//     constexpr auto names(Order) { return std::array{"contiguous", "zigzag"}; }      // of each value, in their order
//
//     parse<Order>("order", "zigzag")      Order::zigzag
//     name_of(Order::zigzag)               "zigzag"
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace fived {

template <class E>
concept Named = std::is_enum_v<E> && requires { names(E{}); };

template <Named E>
constexpr const char* name_of(E value) {
    return names(value)[std::size_t(value)];
}

/// All values, in their order.
template <Named E>
std::vector<E> values_of() {
    std::vector<E> values;
    for (std::size_t i = 0; i < names(E{}).size(); ++i) values.push_back(E(i));
    return values;
}

/// The value of that name, if there is one.
template <Named E>
std::optional<E> find_named(std::string_view name) {
    for (const E value : values_of<E>())
        if (name == name_of(value)) return value;
    return {};
}

/// The value of that name. Throws std::invalid_argument for any other: "order is spiral; it is contiguous or zigzag".
template <Named E>
E parse(const std::string& what, const std::string& name) {
    if (const std::optional<E> found = find_named<E>(name)) return *found;
    std::string list;
    for (const E value : values_of<E>())
        list += (list.empty()                     ? ""
                 : value == values_of<E>().back() ? " or "
                                                  : ", ") +
                std::string(name_of(value));
    throw std::invalid_argument(what + " is " + name + "; it is " + list);
}

}  // namespace fived
