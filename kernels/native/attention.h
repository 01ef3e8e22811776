// Causal attention over pages, one pass with a running softmax (Dao et al., https://arxiv.org/abs/2205.14135).
//
// `FewQueries` computes scores and weighted values from the pages as they are; here is the pass over them. Of many
// queries it is `ManyQueries`'.
#pragma once

#include "few_queries.h"
#include "many_queries.h"
#include "paged_rows.h"
#include "read_ahead.h"

namespace kvrelay {
namespace {

constexpr int kShortBlock = 64;  // keys at a time; the next ones are fetched meanwhile

template <class Isa, class Weight>
struct PagedAttention {
    using F = typename Isa::F;
    using U = typename Isa::U;
    using Few = FewQueries<Isa, Weight>;
    using Many = ManyQueries<Isa, Weight>;
    using In = Input<Isa, Weight>;

    static constexpr int width = Isa::width;

    static int padded(int n) { return (n + kPanel - 1) / kPanel * kPanel; }

    // ---- memory of one call

    struct Memory {
        Weight* zeros;       // [head_dim]: a token that is not there
        In* q;               // [rows, head_dim]
        float* scores;       // [rows, kShortBlock]
        In* weights;         // [rows, kShortBlock]
        float* highest;      // [heads, rows]
        float* total;        // [heads, rows]
        float* shrink;       // [rows]: what a new highest score does to earlier sums
        float* sums;         // [heads, rows, padded head_dim]
    };

    // `states` counts the rows of all KV heads, `rows` those of one.
    template <class Take>
    static void lay_out(Memory& memory, int rows, int states, int head_dim, Take take) {
        take(memory.zeros, head_dim);
        take(memory.q, rows * head_dim);
        take(memory.scores, rows * kShortBlock);
        take(memory.weights, rows * kShortBlock);
        take(memory.highest, states);
        take(memory.total, states);
        take(memory.shrink, rows);
        take(memory.sums, states * padded(head_dim));
    }

    static size_t bytes(int lanes, int head_dim) {
        Memory memory;
        size_t total = 64;
        lay_out(memory, lanes, lanes, head_dim, [&](auto& at, size_t count) {
            total += (count * sizeof(*at) + 63) / 64 * 64;
        });
        const size_t many = Many::bytes(lanes, head_dim);
        return total > many ? total : many;
    }

    // ---- the pass

    static void attend(const Attention& job, void* given) {
        const PagedKV& kv = *job.kv;
        const int group = job.heads / kv.kv_heads, rows = group * job.queries;
        if (!Few::fits(rows, kv.head_dim)) return Many::attend(job, given);
        const int heads = job.last_head - job.first_head, states = heads * rows;
        const int dims = padded(kv.head_dim);
        Memory memory;
        char* next = static_cast<char*>(given) + (64 - reinterpret_cast<uintptr_t>(given) % 64) % 64;
        lay_out(memory, rows, states, kv.head_dim, [&](auto& at, size_t count) {
            at = reinterpret_cast<std::remove_reference_t<decltype(at)>>(next);
            next += (count * sizeof(*at) + 63) / 64 * 64;
        });
        std::memset(static_cast<void*>(memory.zeros), 0, kv.head_dim * sizeof(Weight));
        std::memset(memory.total, 0, states * sizeof(float));
        std::memset(memory.sums, 0, states * size_t(dims) * sizeof(float));
        for (int i = 0; i < states; ++i) memory.highest[i] = kLowest;

        ReadAhead(job, job.first_key, end_of(job, job.first_key + kShortBlock)).fetch(INT32_MAX);
        for (int key = job.first_key; key < job.last_key; key += kShortBlock) {
            const int keys = end_of(job, key + kShortBlock) - key;
            ReadAhead ahead(job, key + kShortBlock, end_of(job, key + 2 * kShortBlock));
            for (int head = 0; head < heads; ++head) {
                const Weight *key_rows[kShortBlock], *value_rows[kShortBlock];
                locate(job, key, keys, padded(keys), job.first_head + head, memory.zeros, key_rows, value_rows);
                gather_queries(job, memory, job.first_head + head, group);
                Few::score(key_rows, padded(keys), memory.q, rows, kv.head_dim, memory.scores, kShortBlock, ahead);
                weigh(job, memory, head * rows, rows, group, key, keys);
                Few::add_values(value_rows, padded(keys), memory.weights, kShortBlock, rows, kv.head_dim,
                                memory.shrink, memory.sums + head * rows * int64_t{dims}, dims, ahead);
            }
        }
        finish(job, memory, heads, rows, group);
    }

    static int end_of(const Attention& job, int key) { return key < job.last_key ? key : job.last_key; }

    static void gather_queries(const Attention& job, Memory& memory, int kv_head, int group) {
        const int head_dim = job.kv->head_dim;
        const In* from = static_cast<const In*>(job.q) + kv_head * group * int64_t{head_dim};
        const size_t run = size_t(group) * head_dim;
        for (int query = 0; query < job.queries; ++query) {
            std::memcpy(memory.q + query * run, from + query * int64_t{job.heads} * head_dim, run * sizeof(In));
        }
    }

    // Scores to weights; earlier sums are to be multiplied by `shrink`.
    static void weigh(const Attention& job, Memory& memory, int state, int rows, int group, int key, int keys) {
        for (int row = 0; row < rows; ++row) {
            const int position = job.position + row / group;
            const int oldest = job.kv->window ? position - job.kv->window + 1 : 0;
            const int first = oldest > key ? oldest - key : 0;
            const int last = position + 1 - key < keys ? position + 1 - key : keys;
            float* scores = memory.scores + row * kShortBlock;
            In* weights = memory.weights + row * kShortBlock;
            if (first >= last) {
                std::memset(static_cast<void*>(weights), 0, padded(keys) * sizeof(In));
                memory.shrink[row] = 1.0f;
                continue;
            }
            finish_scores(scores, padded(keys), *job.kv);
            for (int i = 0; i < first; ++i) scores[i] = kLowest;
            for (int i = last; i < padded(keys); ++i) scores[i] = kLowest;
            F top = load<F>(scores);
            for (int i = width; i < padded(keys); i += width) {
                const F other = load<F>(scores + i);
                top = top > other ? top : other;
            }
            float highest = memory.highest[state + row];
            const float before = highest;
            for (int i = 0; i < width; ++i) highest = top[i] > highest ? top[i] : highest;
            F total = {};
            for (int i = 0; i < padded(keys); i += width) {
                const F weight = exp<Isa>(load<F>(scores + i) - highest);
                total += weight;
                store_float<Isa>(weights + i, weight);
            }
            const float shrink = exp<Isa>(all<Isa>(before - highest))[0];
            memory.shrink[row] = shrink;
            memory.highest[state + row] = highest;
            memory.total[state + row] = memory.total[state + row] * shrink + sum<Isa>(total);
        }
    }

    static void finish_scores(float* scores, int keys, const PagedKV& kv) {
        for (int i = 0; i < keys; i += width) {
            F value = load<F>(scores + i) * kv.scale;
            if (kv.soft_cap > 0) value = tanh<Isa>(value / kv.soft_cap) * kv.soft_cap;
            store(scores + i, value);
        }
    }

    static void finish(const Attention& job, const Memory& memory, int heads, int rows, int group) {
        const int head_dim = job.kv->head_dim, dims = padded(head_dim);
        for (int head = 0; head < heads; ++head) {
            for (int row = 0; row < rows; ++row) {
                const int state = head * rows + row;
                const int64_t at = int64_t{row / group} * job.heads + (job.first_head + head) * group + row % group;
                const float* sums = memory.sums + state * int64_t{dims};
                if (job.partial) {
                    float* out = job.partial + at * (head_dim + 2);
                    out[0] = memory.highest[state];
                    out[1] = memory.total[state];
                    std::memcpy(out + 2, sums, head_dim * sizeof(float));
                } else {
                    In* out = static_cast<In*>(job.out) + at * head_dim;
                    const float share = 1.0f / memory.total[state];
                    int i = 0;
                    for (; i + width <= head_dim; i += width) store_float<Isa>(out + i, load<F>(sums + i) * share);
                    for (; i < head_dim; ++i) narrow(sums[i] * share, out[i]);
                }
            }
        }
    }

    static void merge(const float* partial, int parts, int64_t stride, int heads, int head_dim, void* to) {
        In* out = static_cast<In*>(to);
        for (int head = 0; head < heads; ++head, out += head_dim, partial += head_dim + 2) {
            float highest = kLowest, total = 0;
            for (int part = 0; part < parts; ++part) {
                const float one = partial[part * stride];
                highest = one > highest ? one : highest;
            }
            for (int part = 0; part < parts; ++part) {
                const float* from = partial + part * stride;
                total += exp<Isa>(all<Isa>(from[0] - highest))[0] * from[1];
            }
            for (int i = 0; i < head_dim; ++i) narrow(0.0f, out[i]);
            for (int i = 0; i < head_dim; i += kPanel) {
                float sums[kPanel] = {};
                const int count = head_dim - i < kPanel ? head_dim - i : kPanel;
                for (int part = 0; part < parts; ++part) {
                    const float* from = partial + part * stride;
                    const float share = exp<Isa>(all<Isa>(from[0] - highest))[0] / total;
                    for (int k = 0; k < count; ++k) sums[k] += from[2 + i + k] * share;
                }
                for (int k = 0; k < count; ++k) narrow(sums[k], out[i + k]);
            }
        }
    }
};

}  // namespace
}  // namespace kvrelay
