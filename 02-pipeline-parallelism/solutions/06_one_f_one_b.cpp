// 1F1B: fill, alternate, drain.
#include <algorithm>
#include <utility>
#include <vector>

using Pass = std::pair<char, int>;  // 'F' or 'B', and the micro-batch

/// The passes of one rank, in order.
std::vector<Pass> one_f_one_b(int rank, int ranks, int micro_batches) {
    const int fill = std::min(ranks - rank - 1, micro_batches);
    std::vector<Pass> list;
    for (int m = 0; m < fill; ++m) list.emplace_back('F', m);
    for (int m = fill; m < micro_batches; ++m) list.emplace_back('F', m), list.emplace_back('B', m - fill);
    for (int m = micro_batches - fill; m < micro_batches; ++m) list.emplace_back('B', m);
    return list;
}
