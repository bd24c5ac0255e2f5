// What torch hands over, as memory that a processor can read and that collectives can cut.
//
//     CPU, contiguous    itself
//     CPU, with gaps     a contiguous copy, copied back when all is done; in an all-to-all between ranks of one host the
//                        tensor itself, if its runs have at least 64 bytes or it is sent by columns (Strided::crosswise)
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
#include <type_traits>
#include <utility>
#include <vector>

#include "fived/mpi/strided.hpp"

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

/// Where the numbers of a CPU's tensor lie, without a copy. Nothing if copying each run would take longer than a copy by
/// torch, which knows how to transpose. Only a sender (const Byte) may list a matrix by columns.
template <class Byte>
std::optional<Strided<Byte>> strided(const at::Tensor& t) {
    constexpr std::size_t shortest_run = 64;  // a line of the cache
    std::size_t run = t.element_size();
    std::vector<typename Strided<Byte>::Dim> outer;
    for (std::int64_t d = t.dim(); d-- > 0;) {
        const std::size_t count = t.size(d);
        const std::ptrdiff_t apart = t.stride(d) * std::ptrdiff_t(t.element_size());
        if (count == 1) continue;
        if (outer.empty() && apart == std::ptrdiff_t(run))
            run *= count;
        else if (!outer.empty() && apart == outer.front().apart * std::ptrdiff_t(outer.front().count))
            outer.front().count *= count;
        else
            outer.insert(outer.begin(), {count, apart});
    }
    if (t.numel() == 0) return Strided<Byte>();
    if (outer.size() > Strided<Byte>::most_dims) return {};
    Strided<Byte> all(bytes_of(t), run, std::move(outer));
    const bool transposes = std::is_const_v<Byte> && all.crosswise();
    return run >= shortest_run || all.outer.empty() || transposes ? std::optional(std::move(all))
                                                                  : std::nullopt;
}

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
    /// The memory of t, with its gaps if `gaps` and `strided` takes them; otherwise as `read` and `write` give it.
    Strided<const std::byte> read_strided(const at::Tensor& t, bool gaps) {
        if (gaps && is_near(t))
            if (const auto x = strided<const std::byte>(t)) return kept_.push_back(t), *x;
        const at::Tensor x = read(t);
        return std::span<const std::byte>(bytes_of(x), x.nbytes());
    }
    Strided<std::byte> write_strided(const at::Tensor& t, bool gaps) {
        if (gaps && is_near(t))
            if (const auto x = strided<std::byte>(t)) return kept_.push_back(t), *x;
        const at::Tensor x = write(t, false);
        return std::span(bytes_of(x), x.nbytes());
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
