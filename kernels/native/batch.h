// The requests of one step, and how their attention is shared out among threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvrelay {

// Attention of some queries of one request over some of its keys.
struct AttentionItem {
    int request;
    int token;  // row of the first query in the step
    int position, queries;
    int first_head, last_head;
    int first_key, last_key;
    int partial;  // index of its unfinished result, or -1 when it is alone
};

// The `parts` unfinished results `first`, `first + stride`, ... make up a token's attention.
struct AttentionMerge {
    int token, first, parts, stride;
};

struct AttentionWork {
    std::vector<AttentionItem> items;
    std::vector<AttentionMerge> merges;
    int partials = 0;
    int most_lanes = 0;  // of any item: queries times heads, of each KV head filled up to whole panels
};

class Batch {
  public:
    // Throws std::invalid_argument unless every request has queries, and pages for its context.
    Batch(std::vector<int> queries, std::vector<int> contexts, const std::vector<std::vector<int32_t>>& tables,
          int page_size);

    int tokens() const { return static_cast<int>(slots_.size()); }
    int page_size() const { return page_size_; }
    const int32_t* table(int request) const { return pages_.data() + table_starts_[request]; }
    // Where in a layer's KV a token of the step is stored: the row of its key.
    int64_t slot(int token) const { return slots_[token]; }

    // Throws std::invalid_argument when a block table names a page that a pool of `pages` lacks.
    void check_pages(int64_t pages) const;

    AttentionWork share_out(int heads, int kv_heads, int threads) const;

  private:
    std::vector<int> queries_, contexts_;
    std::vector<int32_t> pages_;  // of all requests
    std::vector<size_t> table_starts_;
    std::vector<int64_t> slots_;
    int page_size_;
};

}  // namespace kvrelay
