#include "batch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "packed_matrix.h"

namespace kvrelay {

namespace {

constexpr int kFewQueries = 4;     // up to here a request is bound by memory: its heads go together
constexpr int kRows = 384;         // queries times heads of one item of a prompt
constexpr int kLeastKeys = 128;    // of a part: shorter ones cost more to merge than they save
constexpr int kPartsPerThread = 4;

int lanes(int rows) { return (rows + kPanel - 1) / kPanel * kPanel; }

}  // namespace

Batch::Batch(std::vector<int> queries, std::vector<int> contexts, const std::vector<std::vector<int32_t>>& tables,
             int page_size)
    : queries_(std::move(queries)), contexts_(std::move(contexts)), page_size_(page_size) {
    if (page_size < 1 || queries_.size() != contexts_.size() || queries_.size() != tables.size()) {
        throw std::invalid_argument("a batch needs as many contexts and block tables as requests");
    }
    for (size_t i = 0; i < queries_.size(); ++i) {
        const int needed = (contexts_[i] + page_size - 1) / page_size;
        if (queries_[i] < 1 || queries_[i] > contexts_[i] || static_cast<size_t>(needed) > tables[i].size()) {
            throw std::invalid_argument("request " + std::to_string(i) + " has " + std::to_string(queries_[i]) +
                                        " query tokens, a context of " + std::to_string(contexts_[i]) + " and " +
                                        std::to_string(tables[i].size()) + " pages");
        }
        table_starts_.push_back(pages_.size());
        pages_.insert(pages_.end(), tables[i].begin(), tables[i].begin() + needed);
        for (int position = contexts_[i] - queries_[i]; position < contexts_[i]; ++position) {
            const int64_t page = tables[i][position / page_size];
            slots_.push_back(page * 2 * page_size + position % page_size);
        }
    }
}

void Batch::check_pages(int64_t pages) const {
    for (const int32_t page : pages_) {
        if (page < 0 || page >= pages) {
            throw std::invalid_argument("page " + std::to_string(page) + " is not among the pool's " +
                                        std::to_string(pages));
        }
    }
}

AttentionWork Batch::share_out(int heads, int kv_heads, int threads) const {
    AttentionWork work;
    int64_t keys_of_few = 0;
    for (size_t i = 0; i < queries_.size(); ++i) {
        if (queries_[i] <= kFewQueries) keys_of_few += contexts_[i];
    }
    const int64_t even = threads == 1 ? INT32_MAX : keys_of_few / (int64_t{threads} * kPartsPerThread);
    const int part_keys = static_cast<int>(std::max<int64_t>(kLeastKeys, even));
    const int group = heads / kv_heads;
    const int together = std::max(1, kRows / group);
    int token = 0;
    for (size_t i = 0; i < queries_.size(); token += queries_[i], ++i) {
        const int start = contexts_[i] - queries_[i];
        AttentionItem item{static_cast<int>(i), token, start, queries_[i], 0, kv_heads, 0, contexts_[i], -1};
        if (queries_[i] > kFewQueries) {
            for (int done = 0; done < queries_[i]; done += together) {
                item.token = token + done;
                item.position = start + done;
                item.queries = std::min(together, queries_[i] - done);
                item.last_key = item.position + item.queries;
                for (int head = 0; head < kv_heads; ++head) {
                    item.first_head = head;
                    item.last_head = head + 1;
                    work.items.push_back(item);
                }
                work.most_lanes = std::max(work.most_lanes, lanes(item.queries * group));
            }
            continue;
        }
        work.most_lanes = std::max(work.most_lanes, kv_heads * lanes(queries_[i] * group));
        const int parts = std::max(1, contexts_[i] / part_keys);
        for (int part = 0; part < parts; ++part) {
            item.first_key = static_cast<int>(int64_t{contexts_[i]} * part / parts);
            item.last_key = static_cast<int>(int64_t{contexts_[i]} * (part + 1) / parts);
            item.partial = parts > 1 ? work.partials + part * queries_[i] : -1;
            work.items.push_back(item);
        }
        if (parts == 1) continue;
        for (int query = 0; query < queries_[i]; ++query) {
            work.merges.push_back({token + query, work.partials + query, parts, queries_[i]});
        }
        work.partials += parts * queries_[i];
    }
    // The longest first, so that no thread begins one when the others are done.
    std::stable_sort(work.items.begin(), work.items.end(), [](const AttentionItem& a, const AttentionItem& b) {
        const auto cost = [](const AttentionItem& item) {
            return int64_t{item.queries} * (item.last_key - item.first_key) * (item.last_head - item.first_head);
        };
        return cost(a) > cost(b);
    });
    return work;
}

}  // namespace kvrelay
