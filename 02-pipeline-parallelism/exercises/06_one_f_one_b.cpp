// 1F1B as a list, in C++.
//
// A pipeline has `ranks` stages, one on each rank, and cuts the batch into `micro_batches`. Each rank's schedule is the
// list of its forward passes ('F', m) and backward passes ('B', m), in order. In 1F1B rank r first runs the forward
// passes that fill the pipeline behind it, ranks - r - 1 of them; then it alternates, one forward, one backward; then it
// runs the backward passes that are left. Micro-batches are in order in both. So a rank holds the activations of at most
// ranks - r micro-batches.
//
//     ranks = 3, micro_batches = 4       rank 0    F0 F1 F2 B0 F3 B1 B2 B3
//                                        rank 1    F0 F1 B0 F2 B1 F3 B2 B3
//                                        rank 2    F0 B0 F1 B1 F2 B2 F3 B3
//
// Targets: complete lists for 1 to 6 ranks and 1 to 12 micro-batches; activations held; no rank waits for ever; with
// forward passes of 1 and backward passes of 2 units a step takes 3 (micro_batches + ranks - 1).
#include <stdexcept>
#include <utility>
#include <vector>

using Pass = std::pair<char, int>;  // 'F' or 'B', and the micro-batch

/// The passes of one rank, in order.
std::vector<Pass> one_f_one_b(int rank, int ranks, int micro_batches) {
    (void)rank, (void)ranks, (void)micro_batches;
    throw std::logic_error(
        "not written: begin with the forward passes that fill the pipeline behind this rank");
}
