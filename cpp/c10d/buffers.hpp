// What torch hands over, as memory without gaps.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <utility>
#include <vector>

namespace fived {

inline std::byte* bytes_of(const at::Tensor& t) {
    return static_cast<std::byte*>(t.data_ptr());
}

/// Tensors that a kernel can read and write: those given, or contiguous copies of them.
class Buffers {
  public:
    at::Tensor read(const at::Tensor& t) {
        const at::NoGradGuard no_grad;
        kept_.push_back(t.contiguous());
        return kept_.back();
    }
    /// `used`: what it holds counts, not only what it will hold.
    at::Tensor write(const at::Tensor& t, bool used) {
        if (t.is_contiguous()) return kept_.emplace_back(t);
        const at::NoGradGuard no_grad;
        at::Tensor copy = used ? t.contiguous() : at::empty_like(t, at::MemoryFormat::Contiguous);
        copied_.emplace_back(t, copy);
        return copy;
    }
    void finish() {
        const at::NoGradGuard no_grad;
        for (auto& [to, from] : copied_) to.copy_(from);
    }

  private:
    std::vector<at::Tensor> kept_;
    std::vector<std::pair<at::Tensor, at::Tensor>> copied_;
};

}  // namespace fived
