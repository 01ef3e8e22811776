// Attention of a whole batch, by all threads of a step.
#pragma once

#include <atomic>
#include <optional>

#include "arena.h"
#include "batch.h"
#include "kernel_table.h"
#include "thread_pool.h"

namespace kvrelay {

class BatchAttention {
  public:
    explicit BatchAttention(const KernelTable& table) : table_(table) {}

    // Before a step, on one thread: for `calls` calls of `run`.
    void prepare(const Batch& batch, int heads, int kv_heads, int head_dim, int threads, int calls);

    // The `call`th of the step, on every thread. `q` and `out` are [tokens, heads, head_dim] of the input type.
    // The output is complete after the caller's next barrier.
    void run(int call, const PagedKV& kv, const void* q, void* out, int thread, Team& team);

  private:
    // The next item that no thread has taken.
    std::optional<Attention> claim(int call, const PagedKV& kv, const void* q, void* out);

    const KernelTable& table_;
    const Batch* batch_ = nullptr;
    AttentionWork work_;
    int heads_ = 0, head_dim_ = 0;
    size_t memory_bytes_ = 0;
    Scratch memory_;   // of each thread
    Scratch partial_;
    std::vector<std::atomic<size_t>> next_;  // item, of each call
};

}  // namespace kvrelay
