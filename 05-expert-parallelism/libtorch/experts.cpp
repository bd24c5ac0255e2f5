#include "experts.hpp"

#include <numeric>
#include <stdexcept>

#include "fived/torch/torch.hpp"

namespace fived {

namespace {

using torch::autograd::AutogradContext;
using Tensors = std::vector<at::Tensor>;

/// run(expert, its rows of a, its rows of b)
template <class Run>
void for_each(const Counts& counts, const at::Tensor& a, const at::Tensor& b, Run run) {
    std::int64_t begin = 0;
    for (std::size_t e = 0; e < counts.size(); begin += counts[e++])
        run(std::int64_t(e), a.narrow(0, begin, counts[e]), b.narrow(0, begin, counts[e]));
}

/// y = x w^T + b
at::Tensor linear(const at::Tensor& x_RI, const at::Tensor& w_eOI, const at::Tensor& b_eO,
                  const Counts& counts) {
    const at::Tensor y_RO = x_RI.new_empty({x_RI.size(0), w_eOI.size(1)});
    for_each(counts, x_RI, y_RO, [&](std::int64_t e, const at::Tensor& x, at::Tensor y) {
        if (b_eO.defined())
            at::addmm_out(y, b_eO[e], x, w_eOI[e].t());
        else
            at::mm_out(y, x, w_eOI[e].t());
    });
    return y_RO;
}

/// dx = dy w
at::Tensor input_gradient(const at::Tensor& dy_RO, const at::Tensor& w_eOI, const Counts& counts) {
    const at::Tensor dx_RI = dy_RO.new_empty({dy_RO.size(0), w_eOI.size(2)});
    for_each(counts, dy_RO, dx_RI,
             [&](std::int64_t e, const at::Tensor& dy, at::Tensor dx) { at::mm_out(dx, dy, w_eOI[e]); });
    return dx_RI;
}

/// dw = dy^T x; of an expert without rows zeros.
at::Tensor weight_gradient(const at::Tensor& dy_RO, const at::Tensor& x_RI, const Counts& counts) {
    const at::Tensor dw_eOI = dy_RO.new_empty({std::int64_t(counts.size()), dy_RO.size(1), x_RI.size(1)});
    for_each(counts, dy_RO, x_RI, [&](std::int64_t e, const at::Tensor& dy, const at::Tensor& x) {
        at::Tensor dw = dw_eOI[e];
        at::mm_out(dw, dy.t(), x);
    });
    return dw_eOI;
}

at::Tensor bias_gradient(const at::Tensor& dy_RO, const Counts& counts) {
    const at::Tensor db_eO = dy_RO.new_empty({std::int64_t(counts.size()), dy_RO.size(1)});
    for_each(counts, dy_RO, dy_RO, [&](std::int64_t e, const at::Tensor& dy, const at::Tensor&) {
        at::Tensor db = db_eO[e];
        at::sum_out(db, dy, 0);
    });
    return db_eO;
}

enum {
    up,
    down,
    gate
};  // the order in which weights and biases are given; there may be no gate, and no bias

struct Mlps : torch::autograd::Function<Mlps> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& x_RD, at::TensorList weights,
                              at::TensorList biases, const Counts& counts) {
        const auto bias = [&](int i) { return biases.empty() ? at::Tensor() : biases[i]; };
        const at::Tensor u_RF = linear(x_RD, weights[up], bias(up), counts);
        Tensors saved{x_RD, u_RF};
        at::Tensor h_RF;
        if (weights.size() > gate) {
            saved.push_back(linear(x_RD, weights[gate], bias(gate), counts));
            h_RF = at::silu(saved.back()).mul_(u_RF);
        } else {
            h_RF = at::gelu(u_RF, "tanh");
        }
        const at::Tensor y_RD = linear(h_RF, weights[down], bias(down), counts);
        saved.insert(saved.end(), weights.begin(), weights.end());
        context->save_for_backward(saved);
        context->saved_data["counts"] = counts;
        context->saved_data["bias"] = !biases.empty();
        return y_RD;
    }

    static Tensors backward(AutogradContext* context, const Tensors& gradients) {
        refuse_second_derivative();
        const Tensors saved = context->get_saved_variables();
        const Counts counts = context->saved_data.at("counts").toIntVector();
        const bool gated = saved.size() == 6, biased = context->saved_data.at("bias").toBool();
        const at::Tensor dy_RD = gradients[0].contiguous(), &x_RD = saved[0], &u_RF = saved[1];
        const at::Tensor* weights = &saved[gated ? 3 : 2];

        const at::Tensor dh_RF = input_gradient(dy_RD, weights[down], counts);
        at::Tensor h_RF, du_RF, dg_RF;
        if (gated) {
            const at::Tensor& g_RF = saved[2];
            const at::Tensor silu_RF = at::silu(g_RF);
            h_RF = silu_RF * u_RF;
            dg_RF = at::silu_backward(dh_RF * u_RF, g_RF);
            du_RF = dh_RF * silu_RF;
        } else {
            h_RF = at::gelu(u_RF, "tanh");
            du_RF = at::gelu_backward(dh_RF, u_RF, "tanh");
        }
        at::Tensor dx_RD = input_gradient(du_RF, weights[up], counts);
        Tensors found{{}, weight_gradient(du_RF, x_RD, counts), weight_gradient(dy_RD, h_RF, counts)};
        if (gated) {
            dx_RD.add_(input_gradient(dg_RF, weights[gate], counts));
            found.push_back(weight_gradient(dg_RF, x_RD, counts));
        }
        found[0] = dx_RD;
        if (biased) {
            found.push_back(bias_gradient(du_RF, counts));
            found.push_back(bias_gradient(dy_RD, counts));
            if (gated) found.push_back(bias_gradient(dg_RF, counts));
        }
        found.emplace_back();  // of the counts there is none
        return found;
    }
};

}  // namespace

at::Tensor experts(const at::Tensor& rows_RD, const Counts& counts_e, const Parameters& mine,
                   const std::string& prefix) {
    Tensors weights{find(mine, prefix + "up_proj.weight"), find(mine, prefix + "down_proj.weight")}, biases;
    if (mine.contains(prefix + "gate_proj.weight"))
        weights.push_back(find(mine, prefix + "gate_proj.weight"));
    if (mine.contains(prefix + "up_proj.bias"))
        for (const char* name : {"up_proj.bias", "down_proj.bias", "gate_proj.bias"})
            if (biases.size() < weights.size()) biases.push_back(find(mine, prefix + name));
    const std::int64_t rows = std::accumulate(counts_e.begin(), counts_e.end(), std::int64_t{0});
    if (rows_RD.dim() != 2 || rows_RD.size(0) != rows || weights[up].size(0) != std::int64_t(counts_e.size()))
        throw std::invalid_argument("experts: " + std::to_string(rows_RD.size(0)) + " rows and " +
                                    std::to_string(weights[up].size(0)) + " experts for counts of " +
                                    std::to_string(rows) + " rows for " + std::to_string(counts_e.size()) +
                                    " experts");
    return Mlps::apply(rows_RD.contiguous(), at::TensorList(weights), at::TensorList(biases), counts_e);
}

void refuse_second_derivative() {
    if (at::GradMode::is_enabled())
        throw std::runtime_error(
            "the backward pass of ep_libtorch has no derivative: leave create_graph out");
}

}  // namespace fived
