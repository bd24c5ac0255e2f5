// What torch hands over, as memory without gaps that a processor can read.
//
//     CPU, contiguous    itself
//     CPU, with gaps     a contiguous copy; copied back when all is done
//     GPU                a copy in pinned host memory, by the device's own copy engine; copied back the same way
//
// Copies from and to a device take their place among what the device has been told to do (a stream), and nobody waits
// for them but who must: the operation begins when the first copies are done, the user's stream after the last.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

namespace fived {

inline std::byte* bytes_of(const at::Tensor& t) {
    return static_cast<std::byte*>(t.data_ptr());
}

/// A place in the order of a device's work. The stream is the one that was current at the first mark().
class Order {
  public:
    explicit Order(const at::Device& device)
        : stream_(c10::impl::VirtualGuardImpl(device.type()).getStream(device)), event_(device.type()) {}
    /// The place is after all that the stream has been given so far.
    void mark() { event_.record(stream_); }
    bool reached() const { return event_.query(); }
    /// What the caller tells the device from now on comes after the place.
    void wait() const {
        const c10::impl::VirtualGuardImpl guard(stream_.device_type());
        event_.block(guard.getStream(stream_.device()));
    }
    c10::Stream stream() const { return stream_; }

  private:
    c10::Stream stream_;
    c10::Event event_;
};

class Buffers {
  public:
    enum class Via {
        automatic,  // the host for what is on a device
        host,       // the host for everything: what a GPU would do, on a CPU
        nothing     // no host: the device's own memory
    };
    explicit Buffers(Via via = Via::automatic) : via_(via) {}

    at::Tensor read(const at::Tensor& t) {
        const at::NoGradGuard no_grad;
        return kept_.emplace_back(is_near(t) ? t.contiguous() : copy(t, true));
    }
    /// `used`: what it holds counts, not only what it will hold.
    at::Tensor write(const at::Tensor& t, bool used) {
        const at::NoGradGuard no_grad;
        if (is_near(t) && t.is_contiguous()) return kept_.emplace_back(t);
        at::Tensor near = !is_near(t) ? copy(t, used)
                          : used      ? t.contiguous()
                                      : at::empty_like(t, at::MemoryFormat::Contiguous);
        return copied_.emplace_back(t, near).second;
    }
    /// Whether what is read is there.
    bool ready() const { return !order_ || order_->reached(); }
    void finish() {
        const at::NoGradGuard no_grad;
        const c10::OptionalStreamGuard guard = here();
        for (auto& [to, from] : copied_) to.copy_(from, /*non_blocking=*/true);
        if (order_) order_->mark();
    }
    /// Null for the CPU.
    std::shared_ptr<Order> order() const { return order_; }
    /// While it lives, the device's stream of these buffers is the current one.
    c10::OptionalStreamGuard here() const {
        return order_ ? c10::OptionalStreamGuard(order_->stream()) : c10::OptionalStreamGuard();
    }

  private:
    bool is_near(const at::Tensor& t) {
        if (!t.is_cpu()) {
            if (!order_) order_ = std::make_shared<Order>(t.device());
            order_->mark();
        }
        return via_ == Via::nothing || (via_ == Via::automatic && t.is_cpu());
    }
    at::Tensor copy(const at::Tensor& t, bool used) {
        at::Tensor near;
        try {
            near = at::empty(t.sizes(), t.options().device(at::kCPU).pinned_memory(!t.is_cpu()));
        } catch (const c10::Error& error) {
            throw std::invalid_argument("no pinned host memory for a tensor on " + t.device().str() + ": " +
                                        error.what_without_backtrace());
        }
        if (used) near.copy_(t, /*non_blocking=*/true);
        if (order_) order_->mark();
        return near;
    }

    Via via_;
    std::shared_ptr<Order> order_;
    std::vector<at::Tensor> kept_;
    std::vector<std::pair<at::Tensor, at::Tensor>> copied_;
};

}  // namespace fived
