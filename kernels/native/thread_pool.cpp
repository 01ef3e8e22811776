#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

namespace kvrelay {

namespace {

constexpr int kSpins = 4000;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

std::vector<int> own_cores() {
    cpu_set_t set;
    std::vector<int> cores;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        for (int core = 0; core < CPU_SETSIZE; ++core) {
            if (CPU_ISSET(core, &set)) cores.push_back(core);
        }
    }
    return cores;
}

void pin(std::thread& thread, int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
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

ThreadPool::ThreadPool(int threads) : team_(threads) {
    const std::vector<int> cores = own_cores();
    for (int thread = 1; thread < threads; ++thread) {
        others_.emplace_back([this, thread] { serve(thread); });
        if (cores.size() == static_cast<size_t>(threads)) pin(others_.back(), cores[thread]);
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
    std::lock_guard alone(one_caller_);
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
}

void ThreadPool::serve(int thread) {
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
