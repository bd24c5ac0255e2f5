// A parameter of which ranks hold parts: where this rank's part lies in its flat arrays, and where in the whole parameter.
#pragma once

#include <cstddef>
#include <vector>

#include "fived/math/mlp.hpp"

namespace fived {

struct Shard : Parameter {
    std::size_t whole_rows, whole_columns, first_row = 0, first_column = 0;
    /// Biases, and the weights of norms.
    bool is_vector() const { return name.ends_with("bias") || name.ends_with("norm.weight"); }
    std::vector<std::size_t> shape() const { return shape(rows, columns); }
    std::vector<std::size_t> whole_shape() const { return shape(whole_rows, whole_columns); }
    bool split() const { return rows < whole_rows || columns < whole_columns; }
    /// Of element i of this part, the place in the whole parameter.
    std::size_t place(std::size_t i) const {
        return (first_row + i / columns) * whole_columns + first_column + i % columns;
    }

  private:
    std::vector<std::size_t> shape(std::size_t m, std::size_t n) const {
        return is_vector() ? std::vector{m} : std::vector{m, n};
    }
};

/// GPT-2's initial value of an element, as in common/models/transformer.py: weights N(0, 0.02^2), those that add to the
/// residual stream smaller by sqrt(2 layers); biases 0, norms 1. name: in the whole model.
class Gpt2Initial {
  public:
    Gpt2Initial(const std::string& name, std::size_t layers, std::uint64_t seed)
        : seed_(seed), constant_(name.ends_with("bias") || name.ends_with("norm.weight")) {
        if (constant_) {
            value_ = name.ends_with("norm.weight");
            return;
        }
        const bool residual = name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
        value_ = residual ? 0.02 / std::sqrt(2 * double(layers)) : 0.02;
        stream_ = stream_of(name);
    }
    double operator()(std::size_t place) const {
        return constant_ ? value_ : normal(seed_, stream_, place) * value_;
    }

  private:
    std::uint64_t seed_, stream_ = 0;
    bool constant_;
    double value_;
};

}  // namespace fived
