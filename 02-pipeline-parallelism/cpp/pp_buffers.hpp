// Memory for the activations of micro-batches.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace fived {

/// Room for activations, all of one size: what is given back is taken again.
template <class T>
class Buffers {
  public:
    using Buffer = std::unique_ptr<T[]>;

    void resize(std::size_t numbers) {
        if (numbers == numbers_) return;
        numbers_ = numbers, made_ = 0;
        spare_.clear();
    }
    Buffer take() {
        if (spare_.empty()) return ++made_, std::make_unique_for_overwrite<T[]>(numbers_);
        Buffer buffer = std::move(spare_.back());
        spare_.pop_back();
        return buffer;
    }
    void give(Buffer buffer) {
        if (buffer) spare_.push_back(std::move(buffer));
    }
    /// The most that was in use at once.
    std::size_t bytes() const { return made_ * numbers_ * sizeof(T); }

  private:
    std::size_t numbers_ = 0, made_ = 0;
    std::vector<Buffer> spare_;
};

}  // namespace fived
