#include "batch_attention.h"

#include <algorithm>

namespace kvrelay {

void BatchAttention::prepare(const Batch& batch, int heads, int kv_heads, int head_dim, int threads, int calls) {
    batch_ = &batch;
    heads_ = heads;
    head_dim_ = head_dim;
    work_ = batch.share_out(heads, kv_heads, threads);
    memory_bytes_ = (table_.attend_bytes(work_.most_lanes, head_dim) + 4095) / 4096 * 4096;
    memory_.at_least<char>(memory_bytes_ * threads);
    partial_.at_least<float>(size_t(work_.partials) * heads * (head_dim + 2));
    next_ = std::vector<std::atomic<size_t>>(calls);
}

std::optional<Attention> BatchAttention::claim(int call, const PagedKV& kv, const void* q, void* out) {
    const size_t index = next_[call].fetch_add(1, std::memory_order_relaxed);
    if (index >= work_.items.size()) return std::nullopt;
    const AttentionItem& item = work_.items[index];
    const size_t row_bytes = size_t(heads_) * head_dim_ * size_of(table_.input);
    const size_t partial_floats = size_t(heads_) * (head_dim_ + 2);
    const int oldest = kv.window ? std::max(0, item.position - kv.window + 1) : 0;
    return Attention{
        &kv,
        batch_->table(item.request),
        static_cast<const char*>(q) + item.token * row_bytes,
        static_cast<char*>(out) + item.token * row_bytes,
        item.partial < 0 ? nullptr : partial_.at_least<float>(0) + item.partial * partial_floats,
        heads_,
        item.position,
        item.queries,
        item.first_head,
        item.last_head,
        std::max(item.first_key, oldest),
        item.last_key,
        nullptr,
        false,
    };
}

void BatchAttention::run(int call, const PagedKV& kv, const void* q, void* out, int thread, Team& team) {
    char* memory = memory_.at_least<char>(0) + memory_bytes_ * thread;
    // Claimed one ahead, so that its first keys are fetched meanwhile.
    std::optional<Attention> job = claim(call, kv, q, out);
    while (job) {
        std::optional<Attention> next = claim(call, kv, q, out);
        job->next = next ? &*next : nullptr;
        table_.attend(*job, memory);
        job = next;
    }
    if (work_.merges.empty()) return;
    team.barrier();
    const float* partials = partial_.at_least<float>(0);
    const size_t partial_floats = size_t(heads_) * (head_dim_ + 2);
    const size_t row_bytes = size_t(heads_) * head_dim_ * size_of(table_.input);
    for (size_t m = thread; m < work_.merges.size(); m += team.threads()) {
        const AttentionMerge& merge = work_.merges[m];
        table_.merge(partials + merge.first * partial_floats, merge.parts, merge.stride * partial_floats, heads_,
                     head_dim_, static_cast<char*>(out) + merge.token * row_bytes);
    }
}

}  // namespace kvrelay
