// Targets of the merge in C++: blocks of random keys, merged one after the other, beside the softmax over all.
// allowed:
// ranks: 1
#include <algorithm>
#include <limits>

#include "fived/lesson/grade.hpp"

using namespace fived::grade;

void merge(Numbers& out_QK, Numbers& l_Q, const Numbers& other_QK, const Numbers& other_l_Q, int Q, int K);

namespace {

constexpr int Q = 6, K = 4, KEYS = 12;
constexpr double NONE = -std::numeric_limits<double>::infinity();

/// Attention over the keys [lo, hi); query q sees the first `seen[q]` keys.
void attend(const Numbers& s, const Numbers& v, const std::vector<int>& seen, int lo, int hi, Numbers& out,
            Numbers& l) {
    out.assign(Q * K, 0), l.assign(Q, NONE);
    for (int q = 0; q < Q; ++q) {
        const int end = std::min(hi, seen[q]);
        double largest = NONE, sum = 0;
        for (int j = lo; j < end; ++j) largest = std::max(largest, s[q * KEYS + j]);
        for (int j = lo; j < end; ++j) sum += std::exp(s[q * KEYS + j] - largest);
        for (int j = lo; j < end; ++j)
            for (int k = 0; k < K; ++k)
                out[q * K + k] += std::exp(s[q * KEYS + j] - largest) / sum * v[j * K + k];
        if (lo < end) l[q] = largest + std::log(sum);
    }
}

void compare(std::mt19937_64& rng, double size, const std::vector<int>& seen) {
    Numbers s = random_of(1, Q * KEYS, rng)[0], v = random_of(1, KEYS * K, rng)[0], out, l, want, want_l;
    for (double& x : s) x *= size;
    attend(s, v, seen, 0, KEYS, want, want_l);
    attend(s, v, seen, 0, 5, out, l);
    for (const auto& [lo, hi] : {std::pair{5, 6}, {6, 11}, {11, 12}}) {
        Numbers other, other_l;
        attend(s, v, seen, lo, hi, other, other_l);
        merge(out, l, other, other_l, Q, K);
    }
    for (int q = 0; q < Q; ++q) {
        const std::string name =
            "query " + std::to_string(q) + ", which sees " + std::to_string(seen[q]) + " keys: ";
        for (int k = 0; k < K; ++k)
            if (std::isnan(out[q * K + k])) throw Wrong(name + "out is not a number");
        same(name + "out", Numbers(out.begin() + q * K, out.begin() + (q + 1) * K),
             Numbers(want.begin() + q * K, want.begin() + (q + 1) * K));
        if (seen[q] == 0 && l[q] != NONE)
            throw Wrong(name + "l is " + std::to_string(l[q]) + ", -infinity is right");
        if (seen[q] > 0) same(name + "l", {l[q]}, {want_l[q]});
    }
}

}  // namespace

int main(int argc, char** argv) {
    const std::vector<int> all(Q, KEYS);
    return run(
        argc, argv,
        {
            {"equal to the softmax over all keys", {1}, [=](MPI_Comm, auto& rng) { compare(rng, 1, all); }},
            {"scores around 1000", {1}, [=](MPI_Comm, auto& rng) { compare(rng, 1000, all); }},
            {"queries that see few keys or none",
             {1},
             [](MPI_Comm, auto& rng) { compare(rng, 3, {12, 5, 6, 1, 0, 9}); }},
        });
}
