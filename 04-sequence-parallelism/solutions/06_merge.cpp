// Merge of two softmax blocks: their weights are exponentials of differences, at most 1.
#include <algorithm>
#include <cmath>
#include <vector>

using Numbers = std::vector<double>;

/// out_QK and l_Q grow by the block other_QK, other_l_Q.
void merge(Numbers& out_QK, Numbers& l_Q, const Numbers& other_QK, const Numbers& other_l_Q, int Q, int K) {
    for (int q = 0; q < Q; ++q) {
        const double largest = std::max(l_Q[q], other_l_Q[q]);
        if (std::isinf(largest)) continue;  // no key in either block
        const double l = largest + std::log(std::exp(l_Q[q] - largest) + std::exp(other_l_Q[q] - largest));
        const double mine = std::exp(l_Q[q] - l), theirs = std::exp(other_l_Q[q] - l);
        for (int k = 0; k < K; ++k)
            out_QK[q * K + k] = mine * out_QK[q * K + k] + theirs * other_QK[q * K + k];
        l_Q[q] = l;
    }
}
