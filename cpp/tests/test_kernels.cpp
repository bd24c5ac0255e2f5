// Arithmetic: exp, GELU, cross-entropy, gemm, optimizers, and the MLP's gradients against finite differences.
#include <limits>
#include <vector>

#include "check.hpp"
#include "fived/lesson/record.hpp"
#include "fived/math/mlp.hpp"
#include "fived/math/optimizer.hpp"

using namespace fived;

namespace {

template <class T>
void test_exponential(double limit) {
    const double unit = std::numeric_limits<T>::epsilon();
    for (double x = -limit; x < limit; x += limit / 9973) {
        const T at = T(x);
        const double right = std::exp(double(at));
        CHECK(std::abs(double(exponential(at)) - right) <= 2 * unit * right);
    }
    CHECK(exponential(T(-1e30)) >= 0 && std::isfinite(exponential(T(1e30))));
}

void test_gelu() {
    const std::vector<double> bias(1, 0.25);
    for (double x = -6; x < 8; x += 0.01) {  // below, e^w itself passes 1e-14: its exponent is rounded
        double z = x - 0.25, a = 0, slope_at[2];
        bias_gelu<double>({&z, 1, 1}, bias, {&a, 1, 1});
        const auto exact = [](long double v) {
            const long double w = std::sqrt(2.0L / 3.14159265358979323846L) * (v + 0.044715L * v * v * v);
            return v / (1 + std::exp(-2 * w));
        };
        const long double v = (x - 0.25) + 0.25, h = 1e-5L;
        CHECK(std::abs(a - exact(v)) <= 1e-14L * std::abs(exact(v)));
        slope_at[0] = z, slope_at[1] = double((exact(v + h) - exact(v - h)) / (2 * h));
        CHECK(std::abs(slope_at[0] - slope_at[1]) < 1e-9);
    }
}

void test_gemm() {
    double a[] = {1, 2, 3, 4, 5, 6}, b[] = {1, 0, 2, 1, 0, 3}, c[] = {1, 1, 1, 1};
    const MatrixView<double> a_23(a, 2, 3), b_32(b, 3, 2), c_22(c, 2, 2);
    gemm<double>(a_23, b_32, c_22, 1);
    CHECK(c[0] == 6 && c[1] == 12 && c[2] == 15 && c[3] == 24);
    gemm<double>(t(b_32), t(a_23), c_22);  // the transposed product
    CHECK(c[0] == 5 && c[1] == 14 && c[2] == 11 && c[3] == 23);
    gemm<double>(a_23.column_block(1, 2), a_23.column_block(0, 2), c_22);  // strides
    CHECK(c[0] == 14 && c[1] == 19 && c[2] == 29 && c[3] == 40);
    CHECK(message_of([&] { gemm<double>(a_23, a_23, c_22); }) == "gemm: [2, 3] times [2, 3] into [2, 2]");
}

void test_gradients() {
    Mlp<double> mlp({6, 5, 4, 3}, 1);
    std::vector<double> x(7 * 6);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = uniform(2, 0, i) - 0.5;
    const std::vector<std::uint8_t> y = {0, 2, 1, 1, 0, 2, 2};
    const MatrixView<const double> x_BI(x.data(), 7, 6);
    std::vector<std::size_t> prefixes;
    const auto nothing = [](std::size_t) {};
    mlp.loss_and_gradients(x_BI, y, 1.0 / 7, false, [&](std::size_t n) { prefixes.push_back(n); });
    CHECK(prefixes == std::vector<std::size_t>{15, 15, 39, 39, 74});
    const std::vector<double> gradients(mlp.gradients().begin(), mlp.gradients().end());
    for (std::size_t i = 0; i < gradients.size(); ++i) {
        const double w = mlp.weights()[i], h = 1e-5;
        mlp.weights()[i] = w + h;
        const double above = mlp.loss_and_gradients(x_BI, y, 1.0 / 7, false, nothing);
        mlp.weights()[i] = w - h;
        const double below = mlp.loss_and_gradients(x_BI, y, 1.0 / 7, false, nothing);
        mlp.weights()[i] = w;
        CHECK(std::abs((above - below) / (2 * h) - gradients[i]) < 1e-8);
    }
    // Two parts, and one of no rows, add up to the whole; a model may start with no rows.
    mlp.loss_and_gradients(x_BI.row_block(0, 3), std::span(y).first(3), 1.0 / 7, false, nothing);
    mlp.loss_and_gradients(x_BI.row_block(3, 0), {}, 1.0 / 7, true, nothing);
    mlp.loss_and_gradients(x_BI.row_block(3, 4), std::span(y).subspan(3), 1.0 / 7, true, nothing);
    for (std::size_t i = 0; i < gradients.size(); ++i)
        CHECK(std::abs(mlp.gradients()[i] - gradients[i]) < 1e-15);
    CHECK(contains(
        message_of([&] { mlp.loss_and_gradients(x_BI, std::span(y).first(6), 1, false, nothing); }), "6"));
}

void test_optimizers() {
    std::vector<double> w = {1, -2}, g = {0.5, 0};
    Sgd{0.1}.step(std::span(w), std::span<const double>(g));
    CHECK(w[0] == 0.95 && w[1] == -2);
    AdamW<double> adamw;
    adamw.epsilon = 1e-8;
    adamw.step(std::span(w), std::span<const double>(g));  // the first step moves by the whole rate
    CHECK(std::abs(w[0] - (0.95 * (1 - 1e-5) - 1e-3)) < 1e-10 && std::abs(w[1] + 2 * (1 - 1e-5)) < 1e-15);
}

void test_record() {
    Record inner, record;
    inner.add("mpi", "a \"quoted\"\nname");
    record.add("n", 3).add("x", 0.1).add("no", nullptr).add("yes", true).add("list", std::vector{1.5, 2.0});
    record.add("nan", std::nan("")).add("inner", inner);
    CHECK(record.line() == R"({"n": 3, "x": 0.1, "no": null, "yes": true, "list": [1.5, 2], "nan": null, )"
                           R"("inner": {"mpi": "a \"quoted\"\u000aname"}})");
    CHECK(median({3, 1, 2}) == 2 && median({4, 1, 2, 3}) == 2.5);
    CHECK(contains(message_of([&] { record.append_to("/nowhere/file"); }), "/nowhere/file"));
    CHECK(random_bits(0, 0, 0) == mix(mix(0x9e3779b97f4a7c15u)) && uniform(1, 2, 3) < 1);
}

}  // namespace

int main() {
    test_exponential<double>(700);
    test_exponential<float>(86);
    test_gelu();
    test_gemm();
    test_gradients();
    test_optimizers();
    test_record();
    return failures > 0;
}
