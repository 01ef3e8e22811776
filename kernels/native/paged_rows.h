// Where a head's keys and values of a block of tokens lie in their pages.
#pragma once

#include "kernel_table.h"

namespace kvrelay {
namespace {

constexpr float kLowest = -1e30f;  // below any score; finite, so that differences are

// Tokens [key, key + keys) of the job's request; from there to `padded` both are `zeros`, [head_dim].
template <class Weight>
inline void locate(
    const Attention& job, int key, int keys, int padded, int head, const Weight* zeros, const Weight** key_rows,
    const Weight** value_rows
) {
    const PagedKV& kv = *job.kv;
    const int64_t row = int64_t{kv.kv_heads} * kv.head_dim;
    const Weight* pool = static_cast<const Weight*>(kv.pool) + head * kv.head_dim;
    int page = key / kv.page_size, slot = key % kv.page_size;
    for (int i = 0; i < keys; ++page, slot = 0) {
        const Weight* at = pool + (int64_t{job.table[page]} * 2 * kv.page_size + slot) * row;
        for (; slot < kv.page_size && i < keys; ++slot, ++i, at += row) {
            key_rows[i] = at;
            value_rows[i] = at + kv.page_size * row;
        }
    }
    for (int i = keys; i < padded; ++i) key_rows[i] = value_rows[i] = zeros;
}

}  // namespace
}  // namespace kvrelay
