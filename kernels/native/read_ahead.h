// Brings keys and values into the cache while others are computed with.
//
// A core tracks few misses at a time, and waits when they are all in use. So prefetches must be spread evenly over the
// time of the computation; then the shorter of the two hides behind the longer.
#pragma once

#include "fetch.h"
#include "kernel_table.h"

namespace kvrelay {
namespace {

class ReadAhead {
  public:
    // Of all heads of tokens [key, last), during a computation of `operations`.
    ReadAhead(const Attention& job, int key, int last, int operations)
        : job_(job),
          row_bytes_(int64_t{job.kv->kv_heads} * job.kv->head_dim * size_of(job.kv->dtype)),
          to_value_(job.kv->page_size * row_bytes_),
          pace_((((last - key) * row_bytes_ / kLine + 1) << kShift) / operations),
          key_(key),
          last_(last) {
        next_run();
    }

    // So many operations are done: fetch what is due.
    inline __attribute__((always_inline)) void after(int operations) {
        for (due_ += operations * pace_; due_ >= kOne && at_ < end_; due_ -= kOne) fetch_line();
    }

    void rest() {
        while (at_ < end_) fetch_line();
    }

  private:
    static constexpr int kLine = 64, kShift = 16;
    static constexpr int64_t kOne = int64_t{1} << kShift;

    // Of keys, and as much of values.
    inline __attribute__((always_inline)) void fetch_line() {
        fetch(at_, into_first_level_);
        fetch(at_ + to_value_, into_first_level_);
        at_ += kLine;
        if (at_ >= end_) next_run();
    }

    // The tokens of one page: their keys lie together, and so do their values.
    void next_run() {
        at_ = end_ = nullptr;
        if (key_ >= last_) return;
        const int page_size = job_.kv->page_size, slot = key_ % page_size;
        const int count = last_ - key_ < page_size - slot ? last_ - key_ : page_size - slot;
        const int64_t row = int64_t{job_.table[key_ / page_size]} * 2 * page_size + slot;
        at_ = static_cast<const char*>(job_.kv->pool) + row * row_bytes_;
        end_ = at_ + count * row_bytes_;
        key_ += count;
    }

    const Attention& job_;
    const int64_t row_bytes_, to_value_;
    const int64_t pace_;  // lines of keys per operation, in 2^-16
    const bool into_first_level_ = kLargeFirstLevel;
    int64_t due_ = 0;     // lines, likewise
    int key_;
    const int last_;
    const char* at_ = nullptr;
    const char* end_ = nullptr;
};

}  // namespace
}  // namespace kvrelay
