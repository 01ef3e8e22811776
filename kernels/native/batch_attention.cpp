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

void BatchAttention::run(int call, const PagedKV& kv, const void* q, void* out, int thread, Team& team) {
    const size_t input = size_of(table_.input);
    const size_t row_bytes = size_t(heads_) * head_dim_ * input;
    const size_t partial_floats = size_t(heads_) * (head_dim_ + 2);
    float* partials = partial_.at_least<float>(0);
    char* memory = memory_.at_least<char>(0) + memory_bytes_ * thread;
    size_t i;
    while ((i = next_[call].fetch_add(1, std::memory_order_relaxed)) < work_.items.size()) {
        const AttentionItem& item = work_.items[i];
        const int oldest = kv.window ? std::max(0, item.position - kv.window + 1) : 0;
        const Attention job{
            &kv,
            batch_->table(item.request),
            static_cast<const char*>(q) + item.token * row_bytes,
            static_cast<char*>(out) + item.token * row_bytes,
            item.partial < 0 ? nullptr : partials + item.partial * partial_floats,
            heads_,
            item.position,
            item.queries,
            item.first_head,
            item.last_head,
            std::max(item.first_key, oldest),
            item.last_key,
        };
        table_.attend(job, memory);
    }
    if (work_.merges.empty()) return;
    team.barrier();
    for (size_t m = thread; m < work_.merges.size(); m += team.threads()) {
        const AttentionMerge& merge = work_.merges[m];
        table_.merge(partials + merge.first * partial_floats, merge.parts, merge.stride * partial_floats, heads_,
                     head_dim_, static_cast<char*>(out) + merge.token * row_bytes);
    }
}

}  // namespace kvrelay
