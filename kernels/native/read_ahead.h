// Brings keys and values into the cache while others are computed with.
//
// A core drops prefetches beyond the few misses that it tracks, so they must be spread over the computation.
#pragma once

#include "kernel_table.h"

namespace kvrelay {
namespace {

class ReadAhead {
  public:
    // Of all heads of tokens [key, last).
    ReadAhead(const Attention& job, int key, int last)
        : kv_(*job.kv),
          table_(job.table),
          row_bytes_(size_t(kv_.kv_heads) * kv_.head_dim * size_of(kv_.dtype)),
          key_(key),
          last_(last) {
        next_run();
    }

    // Fetch `lines` cache lines of keys and as many of values.
    void fetch(int lines) {
        for (; lines > 0 && at_ < end_; --lines) {
            __builtin_prefetch(at_, 0, 2);
            __builtin_prefetch(at_ + to_value_, 0, 2);
            at_ += 64;
            if (at_ >= end_) next_run();
        }
    }

  private:
    // The tokens of one page: their keys lie together, and so do their values.
    void next_run() {
        at_ = end_ = nullptr;
        if (key_ >= last_) return;
        const int slot = key_ % kv_.page_size;
        const int count = last_ - key_ < kv_.page_size - slot ? last_ - key_ : kv_.page_size - slot;
        const int64_t row = int64_t{table_[key_ / kv_.page_size]} * 2 * kv_.page_size + slot;
        at_ = static_cast<const char*>(kv_.pool) + row * row_bytes_;
        end_ = at_ + count * row_bytes_;
        to_value_ = kv_.page_size * row_bytes_;
        key_ += count;
    }

    const PagedKV& kv_;
    const int32_t* table_;
    const size_t row_bytes_;
    int key_, last_;
    const char* at_ = nullptr;
    const char* end_ = nullptr;
    size_t to_value_ = 0;
};

}  // namespace
}  // namespace kvrelay
