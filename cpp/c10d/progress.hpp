// Who moves collectives on. Nothing in this backend blocks: an operation advances when somebody polls.
//
//     Work::wait()      the caller polls until its own operation is done: no hand-over, so no latency
//     progress thread   polls while operations are under way and nobody waits: they advance while Python computes
//
// Ranks of one host move data with their own processors, so the thread's work costs computing time whatever it
// does; it gives its time slice back whenever the other ranks have nothing for it.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace fived {

/// A process group as the engine sees it. All calls come with the engine's lock held.
class Party {
  public:
    /// Moves operations on; adds what is to be done once the lock is free (telling that they are done).
    /// True when anything moved.
    virtual bool advance(std::vector<std::function<void()>>& afterwards) = 0;
    virtual bool busy() const = 0;
    /// MPI is about to end: gives back what is MPI's and never calls it again.
    virtual void end() = 0;

  protected:
    ~Party() = default;
};

class Engine {
  public:
    Engine() {
        pthread_atfork(nullptr, nullptr, [] { forked_ = true; });
    }
    /// Lives as long as the process: a group in a static variable may go after all others.
    static Engine& get() {
        static Engine& engine = *std::make_unique<Engine>().release();
        return engine;
    }
    /// Ends the thread, then every group that is still there. MPI_Finalize calls it.
    void end() {
        if (forked_) return;
        {
            const std::lock_guard lock(mutex_);
            ending_ = true;
        }
        wake_.notify_all();
        if (thread_.joinable()) thread_.join();
        const std::lock_guard lock(mutex_);
        for (Party* party : parties_) party->end();
    }

    /// Whether this is a child of the process that uses MPI. The lock may be held for ever here, by a thread of the parent.
    bool is_forked() const { return forked_; }
    void check_process() const {
        if (forked_)
            throw std::runtime_error(
                "this process was forked from a rank of MPI, whose process groups it cannot use; "
                "start it with multiprocessing's spawn or forkserver");
    }

    void add(Party* party) {
        const std::lock_guard lock(mutex_);
        parties_.push_back(party);
    }
    void remove(Party* party) {
        const std::lock_guard lock(mutex_);
        std::erase(parties_, party);
    }
    /// Calls enqueue() under the lock, which returns whether anything is left to do, and goes as far as it can at
    /// once. `in_background`: the progress thread takes over what is left.
    template <class Enqueue>
    void submit(Enqueue enqueue, bool in_background) {
        check_process();
        {
            const std::lock_guard lock(mutex_);
            if (!enqueue()) return;
        }
        poll();
        if (!in_background || !busy_) return;
        {
            const std::lock_guard lock(mutex_);
            if (!thread_.joinable() && !ending_) thread_ = std::thread([this] { run(); });
        }
        wake_.notify_one();
    }
    /// Moves everything on that can move. True when anything did.
    bool poll() {
        check_process();
        std::vector<std::function<void()>> afterwards;
        bool moved = false, busy = false;
        {
            const std::lock_guard lock(mutex_);
            for (Party* party : parties_) {
                moved |= party->advance(afterwards);
                busy |= party->busy();
            }
            busy_ = busy;
        }
        for (const auto& call : afterwards) call();
        return moved;
    }
    /// Polls until done().
    template <class Done>
    void wait(Done done) {
        struct Leave {  // done() may throw: a wait that timed out
            Engine& engine;
            ~Leave() {
                if (--engine.waiting_ == 0 && engine.busy_) engine.wake_.notify_one();
            }
        };
        ++waiting_;
        const Leave leave{*this};
        for (int idle = 0; !done(); ++idle)
            if (poll())
                idle = 0;
            else if (idle > spins_)
                sched_yield();
    }

    /// Calls done(), with the lock held, until it returns true, for some microseconds at the most. Whether it did.
    template <class Done>
    bool spin(Done done) const {
        bool is_done = done();
        for (int i = 0; !is_done && i < spins_; ++i) is_done = done();
        return is_done;
    }

    /// More ranks than cores: whoever spins keeps another from what it waits for.
    void expect_ranks(int local) {
        if (local > sysconf(_SC_NPROCESSORS_ONLN)) spins_ = 0;
    }

  private:
    /// Polls in vain before the progress thread sleeps, some milliseconds. A sleep takes its 20 us and the system's
    /// 50, far more than a round; and whoever waits for a future of torch's (DDP does) has only this thread.
    static constexpr int patience = 20'000;

    void run() {
        using namespace std::chrono_literals;
        std::unique_lock lock(mutex_);
        int idle = 0;
        while (!ending_) {
            if (!busy_ || waiting_ > 0) {
                wake_.wait_for(lock, 100ms);
                idle = 0;
                continue;
            }
            lock.unlock();
            idle = poll() ? 0 : idle + 1;
            if (idle > patience)
                std::this_thread::sleep_for(20us);
            else if (idle > 0)
                sched_yield();
            lock.lock();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<Party*> parties_;
    std::atomic<bool> busy_ = false;
    std::atomic<int> waiting_ = 0, spins_ = 2000;
    bool ending_ = false;
    static inline std::atomic<bool> forked_ = false;
    std::thread thread_;
};

}  // namespace fived
