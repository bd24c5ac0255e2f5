// The process group without Python, and the ways in which a program may end: test_process_group ENDING.
#include <torch/types.h>

#undef CHECK  // torch's logging has one, too
#include <csignal>
#include <thread>
#include "check.hpp"

#include "fived/mpi/environment.hpp"
#include "process_group.hpp"

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

/// Outlives main(): destroyed with the static variables, after MPI_Finalize and after the engine.
Group kept;
c10::intrusive_ptr<c10d::Work> waiting;

void test_calls(const Group& group) {
    const int n = group->getSize(), rank = group->getRank();
    std::vector<at::Tensor> x{at::full({5}, rank + 1.0, at::kDouble)};
    group->allreduce(x)->wait();
    CHECK(x[0].equal(at::full({5}, n * (n + 1) / 2.0, at::kDouble)));
    at::Tensor mine = at::full({3}, rank, at::kLong), all = at::empty({3 * n}, at::kLong);
    group->all_gather_single(all, mine)->wait();
    CHECK(all.equal(at::arange(n).repeat_interleave(3)));
    group->reduce_scatter_single(mine, all)->wait();
    CHECK(mine.equal(at::full({3}, n * rank, at::kLong)));
    group->barrier()->wait();
}

/// A small all-reduce is done in the calling thread, but not before what is in flight in its group; and it waits for a
/// rank that is late.
void test_small_all_reduce(const Group& group) {
    const int n = group->getSize(), rank = group->getRank();
    c10d::AllreduceOptions now;
    now.asyncOp = false;
    for (int i = 0; i < 20; ++i) {
        if (i % n == rank) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        std::vector<at::Tensor> large{at::full({500'000}, rank, at::kLong)}, small{at::full({3}, i)};
        const auto first = group->allreduce(large);
        CHECK(!group->allreduce(small, now));
        CHECK(large[0].equal(at::full({500'000}, n * (n - 1) / 2, at::kLong)));
        CHECK(small[0].equal(at::full({3}, i * n)));
        CHECK(first->wait());  // the progress thread may not have marked it complete yet
        const auto later = group->allreduce(small);
        CHECK(later->wait() && later->isCompleted() && later->isSuccess());
        CHECK(later->result()[0].equal(at::full({3}, i * n * n)));
        CHECK(later->getFuture()->value().toTensorVector()[0].is_same(small[0]));
    }
}

/// The last rank dies; the others must not wait for it for ever.
void die(const Group& group) {
    std::vector<at::Tensor> x{at::ones({1})};
    for (int i = 0; i < 1000; ++i) group->allreduce(x)->wait();
    if (group->getRank() == group->getSize() - 1) std::raise(SIGKILL);
    for (;;) group->allreduce(x)->wait();
}

/// Ends while a receive is under way that nobody answers, and the progress thread asks for it all the time.
void ask_for_what_never_comes(const Group& group) {
    static std::vector<at::Tensor> x{at::zeros({4})};
    waiting = group->recv(x, (group->getRank() + 1) % group->getSize(), 7);
}

void run(const std::string& ending, int argc, char** argv) {
    {
        fived::Environment mpi(argc, argv, MPI_THREAD_MULTIPLE);
        Group group = fived::world_process_group();
        test_calls(group);
        test_small_all_reduce(group);
        if (ending == "outlives") {
            kept = group;
            ask_for_what_never_comes(group);
        } else if (ending == "pending") {
            ask_for_what_never_comes(group);
        } else if (ending == "leaks") {
            ask_for_what_never_comes(group);
            waiting.release();
            group.release();
        } else if (ending == "dies") {
            die(group);
        } else if (ending == "throws" && group->getRank() == 0) {
            throw std::runtime_error("the reason");
        } else if (ending == "throws") {
            group->barrier()->wait();
        }
    }
    int finalized = 0;
    MPI_Finalized(&finalized);
    CHECK(finalized);
    if (waiting) {
        const std::string why = message_of([] { waiting->wait(); });
        CHECK(contains(why, ending == "outlives" ? "MPI has ended" : "was destroyed"));
    }
    if (kept) {
        std::vector<at::Tensor> x{at::zeros({1})};
        CHECK(contains(message_of([&] { kept->allreduce(x)->wait(); }), "MPI has ended"));
        CHECK(contains(message_of([&] { kept->send(x, 0, 0)->wait(); }), "MPI has ended"));
    }
}

}  // namespace

int main(int argc, char** argv) {
    try {
        run(argc > 1 ? argv[1] : "", argc, argv);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;  // not reached: the environment ends all ranks on its way out
    }
    return failures > 0;
}
