// Python module sp_mpi: ring attention on numpy arrays and an mpi4py communicator.
#include <memory>
#include <optional>

#include "fived/lesson/python.hpp"
#include "fived/math/dtype.hpp"
#include "sp_mpi.hpp"

namespace {

using namespace fived;

/// One Python class for both types of arithmetic.
class Attention {
  public:
    virtual ~Attention() = default;
    virtual py::array forward(const py::array& q, const py::array& k, const py::array& v) = 0;
    virtual py::tuple backward(const py::array& dout) = 0;
    virtual py::array logsumexp() const = 0;
    virtual std::size_t bytes_sent() const = 0;
    virtual std::size_t forward_bytes() const = 0;
    virtual std::size_t backward_bytes() const = 0;
    virtual double blocked_seconds() const = 0;
};

template <class T>
class AttentionOf final : public Attention {
  public:
    AttentionOf(const py::object& comm, const AttentionShape& shape, Order order, bool causal)
        : comm_(communicator_or_none(comm)) {
        ring_.emplace(comm_ ? &*comm_ : nullptr, shape, order, causal);
    }
    py::array forward(const py::array& q, const py::array& k, const py::array& v) override {
        const AttentionShape& shape = ring_->shape();
        q_ = checked("q", q, shape.heads), k_ = checked("k", k, shape.kv_heads),
        v_ = checked("v", v, shape.kv_heads);
        out_ = empty(shape.heads);
        logsumexp_ = Array<T>({shape.batch, shape.heads, ring_->local()});
        const auto out = writable(out_), logsumexp = writable(logsumexp_);
        const py::gil_scoped_release waiting;
        ring_->forward(readable(q_), readable(k_), readable(v_), out, logsumexp);
        return out_;
    }
    py::tuple backward(const py::array& dout) override {
        const AttentionShape& shape = ring_->shape();
        const Array<T> slope = checked("dout", dout, shape.heads);
        if (out_.ndim() != 4) throw std::invalid_argument("backward follows forward; there was none");
        Array<T> dq = empty(shape.heads), dk = empty(shape.kv_heads), dv = empty(shape.kv_heads);
        const auto to_q = writable(dq), to_k = writable(dk), to_v = writable(dv);
        {
            const py::gil_scoped_release waiting;
            ring_->backward(readable(slope), readable(q_), readable(k_), readable(v_), readable(out_),
                            readable(logsumexp_), to_q, to_k, to_v);
        }
        return py::make_tuple(dq, dk, dv);
    }
    py::array logsumexp() const override { return logsumexp_; }
    std::size_t bytes_sent() const override { return ring_->bytes_sent(); }
    std::size_t forward_bytes() const override { return ring_->forward_bytes(); }
    std::size_t backward_bytes() const override { return ring_->backward_bytes(); }
    double blocked_seconds() const override { return ring_->blocked_seconds(); }

  private:
    Array<T> empty(std::size_t heads) const {
        return Array<T>({ring_->shape().batch, heads, ring_->local(), ring_->shape().head_width});
    }
    Array<T> checked(const char* name, const py::array& given, std::size_t heads) const {
        const py::object needed = empty(0).dtype();
        const py::tuple shape =
            py::make_tuple(ring_->shape().batch, heads, ring_->local(), ring_->shape().head_width);
        if (!py::isinstance<Array<T>>(given) || !py::tuple(given.attr("shape")).equal(shape))
            throw std::invalid_argument(std::string(name) + " is " + std::string(py::str(given.dtype())) +
                                        " " + std::string(py::str(given.attr("shape"))) +
                                        "; this rank needs " + std::string(py::str(needed)) + " " +
                                        std::string(py::str(shape)) + " in C order");
        return given.cast<Array<T>>();
    }

    std::optional<Communicator> comm_;
    std::optional<RingAttention<T>> ring_;
    Array<T> q_, k_, v_, out_, logsumexp_;
};

std::unique_ptr<Attention> make(std::size_t batch, std::size_t heads, std::size_t sequence,
                                std::size_t head_width, std::optional<std::size_t> kv_heads,
                                const py::object& comm, bool causal, const std::string& order,
                                const std::string& dtype) {
    const AttentionShape shape{batch, heads, kv_heads.value_or(heads), sequence, head_width};
    return with_type(parse<Dtype>("dtype", dtype), [&]<class T>() -> std::unique_ptr<Attention> {
        return std::make_unique<AttentionOf<T>>(comm, shape, parse<Order>("order", order), causal);
    });
}

std::vector<std::size_t> positions(std::size_t sequence, int ranks, int rank, const std::string& order) {
    if (rank < 0 || rank >= ranks)
        throw std::invalid_argument("no rank " + std::to_string(rank) + " of " + std::to_string(ranks));
    std::vector<std::size_t> all;
    for (const auto& [begin, n] : chunks(sequence, ranks, rank, parse<Order>("order", order)))
        for (std::size_t i = begin; i < begin + n; ++i) all.push_back(i);
    return all;
}

}  // namespace

PYBIND11_MODULE(sp_mpi, module) {
    using namespace py::literals;
    module.doc() = "Ring attention: the sequence is split over the ranks of an mpi4py communicator.";
    module.def("positions", &positions, "sequence"_a, "ranks"_a, "rank"_a, "order"_a = "zigzag",
               "The positions of a rank, in the order in which it holds them.");
    module.def(
        "pairs",
        [](std::size_t sequence, int ranks, int rank, const std::string& order, bool causal) {
            return pairs(sequence, ranks, rank, parse<Order>("order", order), causal);
        },
        "sequence"_a, "ranks"_a, "rank"_a, "order"_a = "zigzag", "causal"_a = true,
        "Pairs of a query of this rank and a key that it sees.");
    py::class_<Attention>(
        module, "RingAttention",
        "softmax(q k' / sqrt K) v of a sequence that is split over comm; serial when comm is None.")
        .def(py::init(&make), "batch"_a, "heads"_a, "sequence"_a, "head_width"_a, "kv_heads"_a = py::none(),
             "comm"_a = py::none(), "causal"_a = true, "order"_a = "zigzag", "dtype"_a = "float64",
             "sequence: of all ranks together. order: contiguous, or zigzag, which balances causal work. "
             "Collective.")
        .def("forward", &Attention::forward, "q"_a, "k"_a, "v"_a,
             "out [B, H, s, K] from q [B, H, s, K] and k, v [B, G, s, K], this rank's positions; query head "
             "h reads\n"
             "key-value head h // (H / G). They are kept, not copied, for backward. Collective.")
        .def("backward", &Attention::backward, "dout"_a,
             "(dq, dk, dv) of the last forward from the gradient of its result. Collective.")
        .def_property_readonly("logsumexp", &Attention::logsumexp, "Of the last forward, [B, H, s].")
        .def_property_readonly("bytes_sent", &Attention::bytes_sent,
                               "Bytes this rank sent in the last forward or backward.")
        .def_property_readonly("forward_bytes", &Attention::forward_bytes, "Bytes of a forward by formula.")
        .def_property_readonly("backward_bytes", &Attention::backward_bytes,
                               "Bytes of a backward by formula.")
        .def_property_readonly("blocked_seconds", &Attention::blocked_seconds,
                               "Seconds this rank waited for messages in the last forward or backward.");
}
