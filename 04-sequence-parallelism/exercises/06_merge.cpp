// Merging attention over two blocks of keys, in C++.
//
// Ring attention sees the keys block by block. For each query it keeps the result so far and the logarithm of the sum of
// its exponentials:
//
//     out = sum_j e^(s_j) v_j / sum_j e^(s_j)          l = log sum_j e^(s_j)
//
// Two such results over different keys merge into that over all of them:
//
//     l = log(e^(l_a) + e^(l_b))          out = e^(l_a - l) out_a + e^(l_b - l) out_b
//
// Scores can be large: e^1000 overflows, and the differences of logarithms do not. A query that sees no key of a block has
// l = -infinity and a result of zeros there; if it sees none in both, it stays so.
//
// out has Q rows of K numbers: element (q, k) is out[q * K + k].
//
// Targets: equal to the softmax over all keys within 1e-12; with scores around +-1000; with queries that see no key.
#include <stdexcept>
#include <vector>

using Numbers = std::vector<double>;

/// out_QK and l_Q grow by the block other_QK, other_l_Q.
void merge(Numbers& out_QK, Numbers& l_Q, const Numbers& other_QK, const Numbers& other_l_Q, int Q, int K) {
    (void)out_QK, (void)l_Q, (void)other_QK, (void)other_l_Q, (void)Q, (void)K;
    throw std::logic_error(
        "not written: take the larger of the two logarithms out of the sum before exponentiating");
}
