// Targets of 1F1B in C++: complete lists, activations held, and the time of a simulated step.
// allowed:
// ranks: 1
#include <map>
#include <utility>

#include "fived/lesson/grade.hpp"

using namespace fived::grade;
using Pass = std::pair<char, int>;

std::vector<Pass> one_f_one_b(int rank, int ranks, int micro_batches);

namespace {

std::string shown(int ranks, int micro, int rank) {
    return std::to_string(ranks) + " stages, " + std::to_string(micro) + " micro-batches, rank " +
           std::to_string(rank) + ": ";
}

std::string text(const Pass& pass) {
    return pass.first + std::to_string(pass.second);
}

template <class Check>
void for_all(Check check) {
    for (int ranks = 1; ranks <= 6; ++ranks)
        for (int micro : {1, 2, 3, 4, 6, 7, 12}) check(ranks, micro);
}

void complete(MPI_Comm, std::mt19937_64&) {
    for_all([](int ranks, int micro) {
        for (int r = 0; r < ranks; ++r) {
            std::map<Pass, int> place;
            const auto list = one_f_one_b(r, ranks, micro);
            for (const Pass& pass : list) {
                if ((pass.first != 'F' && pass.first != 'B') || pass.second < 0 || pass.second >= micro)
                    throw Wrong(shown(ranks, micro, r) + text(pass) + " is no pass of this step");
                if (!place.emplace(pass, int(place.size())).second)
                    throw Wrong(shown(ranks, micro, r) + text(pass) + " stands twice in the list");
            }
            for (int m = 0; m < micro; ++m)
                for (const Pass& pass : {Pass{'F', m}, Pass{'B', m}})
                    if (!place.count(pass)) throw Wrong(shown(ranks, micro, r) + text(pass) + " is missing");
            for (int m = 0; m < micro; ++m)
                if (place[{'B', m}] < place[{'F', m}])
                    throw Wrong(shown(ranks, micro, r) + "B" + std::to_string(m) +
                                " comes before its forward pass");
        }
    });
}

void held(MPI_Comm, std::mt19937_64&) {
    for_all([](int ranks, int micro) {
        for (int r = 0; r < ranks; ++r) {
            int now = 0, slot = 0;
            for (const Pass& pass : one_f_one_b(r, ranks, micro)) {
                now += pass.first == 'F' ? 1 : -1;
                if (now > ranks - r)
                    throw Wrong(shown(ranks, micro, r) + "at slot " + std::to_string(slot) + ", " +
                                text(pass) + ", it holds " + std::to_string(now) +
                                " micro-batches, at most " + std::to_string(ranks - r) + " are allowed");
                ++slot;
            }
        }
    });
}

void time_of_a_step(MPI_Comm, std::mt19937_64&) {
    for_all([](int ranks, int micro) {
        std::vector<std::vector<Pass>> lists;
        for (int r = 0; r < ranks; ++r) lists.push_back(one_f_one_b(r, ranks, micro));
        std::vector<std::size_t> next(ranks);
        std::vector<int> free(ranks);
        std::map<std::pair<int, Pass>, int> end;
        for (bool moved = true; moved;) {
            moved = false;
            for (int r = 0; r < ranks; ++r) {
                while (next[r] < lists[r].size()) {
                    const Pass pass = lists[r][next[r]];
                    const int from = pass.first == 'F' ? r - 1 : r + 1;
                    int begin = free[r];
                    if (from >= 0 && from < ranks) {
                        const auto there = end.find({from, pass});
                        if (there == end.end()) break;
                        begin = std::max(begin, there->second);
                    }
                    free[r] = end[{r, pass}] = begin + (pass.first == 'F' ? 1 : 2);
                    ++next[r], moved = true;
                }
            }
        }
        int last = 0;
        for (int r = 0; r < ranks; ++r) {
            last = std::max(last, free[r]);
            if (next[r] < lists[r].size())
                throw Wrong(shown(ranks, micro, r) + text(lists[r][next[r]]) + " at slot " +
                            std::to_string(next[r]) + " waits for ever");
        }
        if (last != 3 * (micro + ranks - 1))
            throw Wrong(shown(ranks, micro, 0) + "the step takes " + std::to_string(last) + " units, " +
                        std::to_string(3 * (micro + ranks - 1)) + " are right");
    });
}

}  // namespace

int main(int argc, char** argv) {
    return run(argc, argv,
               {
                   {"every pass stands once, backward after forward", {1}, complete},
                   {"rank r holds at most ranks - r micro-batches", {1}, held},
                   {"the step takes 3 (micro_batches + ranks - 1)", {1}, time_of_a_step},
               });
}
