// Causal attention over pages, one pass with a running softmax (Dao et al., https://arxiv.org/abs/2205.14135).
//
// A block of keys of one head is brought into the form of a packed matrix whose outputs are the tokens, a block of
// values into one whose outputs are the dimensions. Scores and weighted values are then products like any other.
#pragma once

#include "gemm.h"

namespace kvrelay {
namespace {

constexpr int kBlock = 128;  // keys at a time: their scores and panels stay in the first-level cache
constexpr float kLowest = -1e30f;  // below any score; finite, so that differences are

template <class Isa, class Weight>
struct PagedAttention {
    using F = typename Isa::F;
    using U = typename Isa::U;
    using Product = Gemm<Isa, Weight>;
    using In = Input<Isa, Weight>;

    static constexpr int width = Isa::width;
    static constexpr int block_units = kBlock / pack<Weight>;

    static int padded(int n) { return (n + kPanel - 1) / kPanel * kPanel; }

    // ---- memory of one call

    struct Memory {
        const Weight** key_rows;  // [2][kBlock]: of this block and the next
        Weight* zeros;            // [head_dim]: a token that is not there
        char* keys;               // panels of 16 tokens, [head_dim / pack][16] units each
        char* values;             // panels of 16 dimensions, [kBlock / pack][16] units each
        In* q;                    // [rows, head_dim]
        float* scores;            // [rows, kBlock]
        In* weights;              // [rows, kBlock]
        float* highest;           // [heads, rows]
        float* total;             // [heads, rows]
        float* shrink;            // [rows]: what a new highest score does to earlier sums
        float* sums;              // [heads, rows, padded head_dim]
    };

    // `states` counts the rows of all KV heads, `rows` those of one.
    template <class Take>
    static void lay_out(Memory& memory, int rows, int states, int head_dim, Take take) {
        take(memory.key_rows, 2 * kBlock);
        take(memory.zeros, head_dim);
        take(memory.keys, kBlock * head_dim * sizeof(Weight));
        take(memory.values, kBlock * padded(head_dim) * sizeof(Weight));
        take(memory.q, rows * head_dim);
        take(memory.scores, rows * kBlock);
        take(memory.weights, rows * kBlock);
        take(memory.highest, states);
        take(memory.total, states);
        take(memory.shrink, rows);
        take(memory.sums, states * padded(head_dim));
    }

    static size_t bytes(int states, int head_dim) {
        Memory memory;
        size_t total = 64;
        lay_out(memory, states, states, head_dim, [&](auto& at, size_t count) {
            total += (count * sizeof(*at) + 63) / 64 * 64;
        });
        return total;
    }

    // ---- the pass

    static void attend(const Attention& job, void* given) {
        const PagedKV& kv = *job.kv;
        const int group = job.heads / kv.kv_heads, rows = group * job.queries;
        const int heads = job.last_head - job.first_head, states = heads * rows;
        const int dims = padded(kv.head_dim);
        Memory memory;
        char* next = static_cast<char*>(given) + (64 - reinterpret_cast<uintptr_t>(given) % 64) % 64;
        lay_out(memory, rows, states, kv.head_dim, [&](auto& at, size_t count) {
            at = reinterpret_cast<std::remove_reference_t<decltype(at)>>(next);
            next += (count * sizeof(*at) + 63) / 64 * 64;
        });
        std::memset(memory.zeros, 0, kv.head_dim * sizeof(Weight));
        std::memset(memory.total, 0, states * sizeof(float));
        std::memset(memory.sums, 0, states * size_t(dims) * sizeof(float));
        for (int i = 0; i < states; ++i) memory.highest[i] = kLowest;

        const Weight** now = memory.key_rows;
        const Weight** later = now + kBlock;
        locate(job, job.first_key, now, memory.zeros);
        for (int key = job.first_key; key < job.last_key; key += kBlock) {
            locate(job, key + kBlock, later, memory.zeros);
            const int keys = job.last_key - key < kBlock ? job.last_key - key : kBlock;
            for (int head = 0; head < heads; ++head) {
                const int at = (job.first_head + head) * kv.head_dim;
                const bool last = head + 1 == heads;
                pack_keys(memory, now, at, last ? later : now, last ? job.first_head * kv.head_dim : at + kv.head_dim,
                          padded(keys), kv.head_dim);
                pack_values(memory, now, last ? later : now, at,
                            last ? job.first_head * kv.head_dim : at + kv.head_dim, padded(keys), kv);
                gather_queries(job, memory, job.first_head + head, group);
                score(memory, rows, keys, kv);
                weigh(job, memory, head * rows, rows, group, key, keys);
                add_values(memory, head * rows, rows, keys, kv.head_dim);
            }
            std::swap(now, later);
        }
        finish(job, memory, heads, rows, group);
    }

    // Where the keys of a block are; those beyond the last are zeros.
    static void locate(const Attention& job, int key, const Weight** rows, const Weight* zeros) {
        const PagedKV& kv = *job.kv;
        const int64_t row_values = int64_t{kv.kv_heads} * kv.head_dim;
        const Weight* pool = static_cast<const Weight*>(kv.pool);
        for (int i = 0; i < kBlock; ++i, ++key) {
            if (key >= job.last_key) {
                rows[i] = nullptr;
                continue;
            }
            const int64_t row = int64_t{job.table[key / kv.page_size]} * 2 * kv.page_size + key % kv.page_size;
            rows[i] = pool + row * row_values;
        }
        (void)zeros;
    }

    static void prefetch(const Weight* row, int at, int head_dim) {
        if (!row) return;
        const char* from = reinterpret_cast<const char*>(row + at);
        for (size_t byte = 0; byte < head_dim * sizeof(Weight); byte += 64) __builtin_prefetch(from + byte, 0, 2);
    }

    // Transpose squares of `width` tokens by `width` units: log2(width) rounds of interleaving.
    static void pack_keys(
        Memory& memory, const Weight* const* rows, int at, const Weight* const* next_rows, int next_at, int keys,
        int head_dim
    ) {
        const int units = head_dim / pack<Weight>;
        for (int key = 0; key < keys; key += width) {
            char* panel = memory.keys + size_t(key / kPanel) * units * kPanel * 4 + key % kPanel * 4;
            const char* from[width];
            for (int i = 0; i < width; ++i) {
                const Weight* row = rows[key + i];
                from[i] = reinterpret_cast<const char*>(row ? row + at : memory.zeros);
                prefetch(next_rows[key + i], next_at, head_dim);
            }
            for (int unit = 0; unit < units; unit += width) {
                const int count = units - unit < width ? units - unit : width;
                U square[width];
                if (count == width) {
#pragma GCC unroll 16
                    for (int i = 0; i < width; ++i) square[i] = load<U>(from[i] + unit * 4);
                } else {
                    for (int i = 0; i < width; ++i) {
                        square[i] = U{};
                        std::memcpy(&square[i], from[i] + unit * 4, count * 4);
                    }
                }
                transpose(square);
                for (int i = 0; i < count; ++i) store(panel + (unit + i) * kPanel * 4, square[i]);
            }
        }
    }

    static inline __attribute__((always_inline)) void transpose(U (&square)[width]) {
#pragma GCC unroll 4
        for (int round = 1; round < width; round *= 2) {
            U mixed[width];
#pragma GCC unroll 16
            for (int i = 0; i < width / 2; ++i) {
                Isa::interleave(square[i], square[i + width / 2], mixed[2 * i], mixed[2 * i + 1]);
            }
#pragma GCC unroll 16
            for (int i = 0; i < width; ++i) square[i] = mixed[i];
        }
    }

    static void pack_values(
        Memory& memory, const Weight* const* rows, const Weight* const* next_rows, int at, int next_at, int keys,
        const PagedKV& kv
    ) {
        const int64_t to_value = int64_t{kv.page_size} * kv.kv_heads * kv.head_dim;
        constexpr int step = pack<Weight>;
        const int whole = kv.head_dim / kPanel * kPanel;
        for (int key = 0; key < keys; key += step) {
            const Weight* from[step];
            for (int i = 0; i < step; ++i) {
                const Weight* row = rows[key + i];
                from[i] = row ? row + to_value + at : memory.zeros;
                prefetch(next_rows[key + i] ? next_rows[key + i] + to_value : nullptr, next_at, kv.head_dim);
            }
            char* to = memory.values + size_t(key / step) * kPanel * 4;
            constexpr size_t panel_bytes = size_t(block_units) * kPanel * 4;
            for (int dim = 0; dim < whole; dim += kPanel, to += panel_bytes) {
                for (int i = 0; i < kPanel; i += width) store(to + i * 4, units(from, dim + i));
            }
            for (int dim = whole; dim < padded(kv.head_dim); ++dim) {
                Weight values[step] = {};
                for (int i = 0; i < step; ++i) {
                    if (dim < kv.head_dim) values[i] = from[i][dim];
                }
                std::memcpy(to + (dim - whole) * 4, values, 4);
            }
        }
    }

    // The same dimensions of `pack` tokens, side by side.
    static U units(const Weight* const* from, int dim) {
        if constexpr (sizeof(Weight) == 4) {
            return load<U>(from[0] + dim);
        } else {
            const U first = __builtin_convertvector(load<typename Isa::H>(from[0] + dim), U);
            const U second = __builtin_convertvector(load<typename Isa::H>(from[1] + dim), U);
            return first | (second << 16);
        }
    }

    static void gather_queries(const Attention& job, Memory& memory, int kv_head, int group) {
        const int head_dim = job.kv->head_dim;
        const In* from = static_cast<const In*>(job.q) + kv_head * group * int64_t{head_dim};
        const size_t run = size_t(group) * head_dim;
        for (int query = 0; query < job.queries; ++query) {
            std::memcpy(memory.q + query * run, from + query * int64_t{job.heads} * head_dim, run * sizeof(In));
        }
    }

    static void score(Memory& memory, int rows, int keys, const PagedKV& kv) {
        const size_t panel_bytes = size_t(kv.head_dim) * kPanel * sizeof(Weight);
        products(memory.keys, panel_bytes, padded(keys) / kPanel, memory.q, kv.head_dim, rows, kv.head_dim,
                 [&](int panel, int row, const float* sums) {
                     float* out = memory.scores + row * kBlock + panel * kPanel;
                     for (int i = 0; i < kPanel; i += width) {
                         F value = load<F>(sums + i) * kv.scale;
                         if (kv.soft_cap > 0) value = tanh<Isa>(value / kv.soft_cap) * kv.soft_cap;
                         store(out + i, value);
                     }
                 });
    }

    // Scores to weights; earlier sums are to be multiplied by `shrink`.
    static void weigh(const Attention& job, Memory& memory, int state, int rows, int group, int key, int keys) {
        for (int row = 0; row < rows; ++row) {
            const int position = job.position + row / group;
            const int oldest = job.kv->window ? position - job.kv->window + 1 : 0;
            const int first = oldest > key ? oldest - key : 0;
            const int last = position + 1 - key < keys ? position + 1 - key : keys;
            float* scores = memory.scores + row * kBlock;
            In* weights = memory.weights + row * kBlock;
            if (first >= last) {
                std::memset(static_cast<void*>(weights), 0, padded(keys) * sizeof(In));
                memory.shrink[row] = 1.0f;
                continue;
            }
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

    static void add_values(Memory& memory, int state, int rows, int keys, int head_dim) {
        const int dims = padded(head_dim);
        products(memory.values, size_t(block_units) * kPanel * 4, dims / kPanel, memory.weights, kBlock, rows,
                 padded(keys), [&](int panel, int row, const float* sums) {
                     float* out = memory.sums + (state + row) * int64_t{dims} + panel * kPanel;
                     for (int i = 0; i < kPanel; i += width) {
                         store(out + i, load<F>(out + i) * memory.shrink[row] + load<F>(sums + i));
                     }
                 });
    }

    template <class Done>
    static void products(
        const char* panels, size_t panel_bytes, int count, const In* x, int64_t stride, int rows, int depth, Done done
    ) {
        for (int first = 0; first < count; first += Product::panels) {
            const int together = count - first < Product::panels ? 1 : Product::panels;
            const char* panel[Product::panels];
            for (int i = 0; i < together; ++i) panel[i] = panels + (first + i) * panel_bytes;
            Product::compute(panel, together, x, stride, rows, depth, [&](int i, int row, const float* sums) {
                done(first + i, row, sums);
            });
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
                    for (int i = 0; i < head_dim; ++i) narrow(sums[i] * share, out[i]);
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
