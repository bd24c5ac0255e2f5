// Gradients of weights that wait. y = x w^T:  dx = dy w, the stage before waits for it  dw = dy^T x, nobody waits for it
// before the optimizer's step. Autograd computes both at once; a zero-bubble schedule puts what dw reads in a list. In every
// schedule the product itself adds to the gradient of the micro-batches before, where autograd would make a tensor of dw
// and pass over memory once more to add it.
#pragma once

#include <string>
#include <vector>

#include "fived/torch/torch.hpp"

namespace fived {

/// dy^T x over all tokens.
inline at::Tensor weight_gradient(const at::Tensor& dy_BSF, const at::Tensor& x_BSD) {
    return dy_BSF.flatten(0, -2).t().mm(x_BSD.flatten(0, -2));
}

/// The same, added to the gradient of `weight`.
inline void add_weight_gradient(const at::Tensor& weight, const at::Tensor& dy_BSF, const at::Tensor& x_BSD) {
    const at::NoGradGuard no_grad;
    at::Tensor& gradient = weight.mutable_grad();
    if (gradient.defined())
        gradient.addmm_(dy_BSF.flatten(0, -2).t(), x_BSD.flatten(0, -2));
    else
        gradient = weight_gradient(dy_BSF, x_BSD);
}

/// Where weight gradients wait.
struct Deferred final : torch::CustomClassHolder {
    struct Work {
        at::Tensor weight, dy, x;
        void operator()() const { add_weight_gradient(weight, dy, x); }
    };
    /// null: weight gradients are computed at once.
    std::vector<Work>* waiting = nullptr;
};
using DeferredPtr = c10::intrusive_ptr<Deferred>;

/// The weight's gradient for autograd to add; undefined where it waits or is added here. weight: as it was saved for the
/// backward pass; autograd alone can add to one that is no leaf.
inline at::Tensor weight_gradient(const at::Tensor& weight, const at::Tensor& dy, const at::Tensor& x,
                                  const DeferredPtr& deferred) {
    if (!deferred || !weight.is_leaf()) return weight_gradient(dy, x);
    if (deferred->waiting)
        deferred->waiting->push_back({weight, dy, x});
    else
        add_weight_gradient(weight, dy, x);
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
