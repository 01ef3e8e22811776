#include "thread_pool.h"

#include <sched.h>

namespace kvrelay {

namespace {

constexpr int kSpins = 4000;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace

void Team::barrier() {
    if (threads_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
        waiting_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
        if (spins < kSpins) {
            pause();
        } else {
            sched_yield();
        }
    }
}

ThreadPool::ThreadPool(int threads) : team_(threads), cores_(threads) {
    for (int thread = 1; thread < threads; ++thread) {
        others_.emplace_back([this, thread] { serve(thread); });
    }
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : others_) thread.join();
}

void ThreadPool::run(const std::function<void(int, Team&)>& work) {
    if (threads() == 1) {
        work(0, team_);
        return;
    }
    std::lock_guard alone(one_caller_);
    // Only for now: what the caller starts later must not inherit one core.
    const cpu_set_t before = cores_.take(0);
    {
        std::lock_guard lock(mutex_);
        work_ = &work;
        running_ = threads() - 1;
        ++round_;
    }
    wake_.notify_all();
    work(0, team_);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    Cores::give_back(before);
}

void ThreadPool::serve(int thread) {
    cores_.take(thread);
    uint64_t seen = 0;
    while (true) {
        const std::function<void(int, Team&)>* work;
        {
            std::unique_lock lock(mutex_);
            wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
            if (stopping_) return;
            seen = round_;
            work = work_;
        }
        (*work)(thread, team_);
        std::lock_guard lock(mutex_);
        if (--running_ == 0) done_.notify_one();
    }
}

}  // namespace kvrelay
