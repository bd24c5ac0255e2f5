// Gradients of weights that wait. y = x w^T:  dx = dy w, the stage before waits for it  dw = dy^T x, nobody waits for it
// before the optimizer's step. Autograd computes both at once; a zero-bubble schedule puts what dw reads in a list.
#pragma once

#include <string>
#include <vector>

#include "fived/torch/torch.hpp"

namespace fived {

/// dy^T x over all tokens.
inline at::Tensor weight_gradient(const at::Tensor& dy_BSF, const at::Tensor& x_BSD) {
    return dy_BSF.flatten(0, -2).t().mm(x_BSD.flatten(0, -2));
}

/// Where weight gradients wait.
struct Deferred final : torch::CustomClassHolder {
    struct Work {
        at::Tensor weight, dy, x;
        void operator()() const {
            const at::NoGradGuard no_grad;
            const at::Tensor dw = weight_gradient(dy, x);
            at::Tensor& gradient = weight.mutable_grad();
            if (gradient.defined())
                gradient += dw;
            else
                gradient = dw;
        }
    };
    /// null: weight gradients are computed at once.
    std::vector<Work>* waiting = nullptr;
};
using DeferredPtr = c10::intrusive_ptr<Deferred>;

/// The weight's gradient; undefined where it waits. weight: as it was saved for the backward pass; only a leaf's can wait.
inline at::Tensor weight_gradient(const at::Tensor& weight, const at::Tensor& dy, const at::Tensor& x,
                                  const DeferredPtr& deferred) {
    if (!deferred || !deferred->waiting || !weight.is_leaf()) return weight_gradient(dy, x);
    deferred->waiting->push_back({weight, dy, x});
    return {};
}

/// `deferred` from the forward pass to the backward pass of an autograd function; it may be null.
inline void keep(torch::autograd::AutogradContext* context, const DeferredPtr& deferred) {
    if (deferred) context->saved_data["deferred"] = at::IValue::make_capsule(deferred);
}
inline DeferredPtr deferred_of(torch::autograd::AutogradContext* context) {
    const auto found = context->saved_data.find("deferred");
    return found == context->saved_data.end()
               ? DeferredPtr()
               : c10::static_intrusive_pointer_cast<Deferred>(found->second.toCapsule());
}

}  // namespace fived
