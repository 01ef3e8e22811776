// A few threads that sleep between steps and meet at barriers within one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "affinity.h"

namespace kvrelay {

// What one thread of a step knows about itself and the others.
class Team {
  public:
    explicit Team(int threads) : threads_(threads) {}

    int threads() const { return threads_; }

    // Wait for all. Spins, because it lasts microseconds, and yields once it takes so long that a thread must
    // have lost its core.
    void barrier();

  private:
    const int threads_;
    alignas(64) std::atomic<int> waiting_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
};

class ThreadPool {
  public:
    // The caller of `run` is the first thread. They share the cores of the thread that makes the pool.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;

    int threads() const { return team_.threads(); }

    // Call `work(thread, team)` on every thread and return when all have. One caller at a time; `work` must
    // not throw.
    void run(const std::function<void(int, Team&)>& work);

  private:
    void serve(int thread);

    Team team_;
    const Cores cores_;
    std::mutex one_caller_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable done_;
    const std::function<void(int, Team&)>* work_ = nullptr;
    uint64_t round_ = 0;
    int running_ = 0;
    bool stopping_ = false;
    std::vector<std::thread> others_;
};

}  // namespace kvrelay
