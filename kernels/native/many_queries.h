// Attention of many rows of queries over a block of keys: scores and weighted values are products like any other.
//
// A row of queries (a query of one head) is a lane: queries are the panel that keys, which lie in rows, are
// multiplied with; weights are the panel of values, which lie in columns. So a softmax has no sums across lanes, and
// the block is prepared once for all rows.
#pragma once

#include "paged_rows.h"
#include "products.h"
#include "transposed.h"

namespace kvrelay {
namespace {

template <class Isa, class Weight>
struct ManyQueries {
    using F = typename Isa::F;
    using U = typename Isa::U;
    using In = Input<Isa, Weight>;
    using Product = Products<Isa, In>;
    using Turned = Transposed<Isa, In>;

    static constexpr int width = Isa::width;
    static constexpr int together = Product::panels;  // of queries, in one product
    static constexpr int kBlock = 128;                // keys at a time: what is made of them stays in the cache
    static constexpr int chains = 4;                  // of sums, so that they need not wait for each other
    static constexpr float kLog2e = 1.44269504f;
    static constexpr float kSlack = 8;  // bits by which a score may exceed the one that weights are relative to

    struct Memory {
        Weight* zeros;        // [head_dim]: a token that is not there
        In* queries;          // [panels, head_dim / pack, 16, pack]
        In* keys;             // [kBlock, head_dim]
        In* values;           // [head_dim, kBlock]
        float* scores;        // [together, kBlock, 16]
        In* weights;          // [together, kBlock / pack, 16, pack]
        uint32_t* positions;  // [lanes]
        float* highest;       // [panels, 16]: the score that weights are relative to, in bits
        float* total;         // [panels, 16]
        float* sums;          // [panels, head_dim, 16]
    };

    static int padded(int n) { return (n + kPanel - 1) / kPanel * kPanel; }

    // `lanes` of all heads.
    template <class Take>
    static void lay_out(Memory& memory, int lanes, int head_dim, Take take) {
        take(memory.zeros, head_dim);
        take(memory.queries, size_t(lanes) * head_dim);
        take(memory.keys, size_t(kBlock) * head_dim);
        take(memory.values, size_t(kBlock) * head_dim);
        take(memory.scores, together * kBlock * kPanel);
        take(memory.weights, together * kBlock * kPanel);
        take(memory.positions, lanes);
        take(memory.highest, lanes);
        take(memory.total, lanes);
        take(memory.sums, size_t(lanes) * head_dim);
    }

    static size_t bytes(int lanes, int head_dim) {
        Memory memory;
        size_t total = 64;
        lay_out(memory, lanes, head_dim, [&](auto& at, size_t count) {
            total += (count * sizeof(*at) + 63) / 64 * 64;
        });
        return total;
    }

    static void attend(const Attention& job, void* given) {
        const int head_dim = job.kv->head_dim, heads = job.last_head - job.first_head;
        const int rows = job.queries * (job.heads / job.kv->kv_heads), panels = padded(rows) / kPanel;
        Memory memory;
        char* next = static_cast<char*>(given) + (64 - reinterpret_cast<uintptr_t>(given) % 64) % 64;
        lay_out(memory, heads * panels * kPanel, head_dim, [&](auto& at, size_t count) {
            at = reinterpret_cast<std::remove_reference_t<decltype(at)>>(next);
            next += (count * sizeof(*at) + 63) / 64 * 64;
        });
        begin(job, memory, heads, rows, panels);
        const typename Product::Registers registers(kPanel);
        for (int key = job.first_key; key < job.last_key; key += kBlock) {
            const int keys = job.last_key - key < kBlock ? job.last_key - key : kBlock;
            for (int head = 0; head < heads; ++head) {
                prepare_block(job, memory, key, keys, job.first_head + head);
                for (int panel = 0; panel < panels; panel += together) {
                    const int count = panels - panel < together ? 1 : together;
                    fetch(job, job.first_head + head, key + kBlock + kBlock * panel / panels,
                          key + kBlock + kBlock * (panel + count) / panels);
                    add_block(job, memory, head * panels, panel, count, rows, key, keys);
                }
            }
        }
        finish(job, memory, heads, rows, panels);
    }

  private:
    static void begin(const Attention& job, Memory& memory, int heads, int rows, int panels) {
        const int head_dim = job.kv->head_dim, group = job.heads / job.kv->kv_heads, lanes = panels * kPanel;
        std::memset(static_cast<void*>(memory.zeros), 0, head_dim * sizeof(Weight));
        std::memset(memory.total, 0, heads * lanes * sizeof(float));
        std::memset(memory.sums, 0, size_t(heads) * lanes * head_dim * sizeof(float));
        for (int i = 0; i < heads * lanes; ++i) memory.highest[i] = kLowest;
        for (int i = 0; i < lanes; ++i) memory.positions[i] = position(job, i, rows);
        for (int head = 0; head < heads; ++head) {
            const In* q = static_cast<const In*>(job.q) + (job.first_head + head) * group * int64_t{head_dim};
            for (int lane = 0; lane < lanes; lane += kPanel) {
                const In* at[kPanel];
                for (int i = 0; i < kPanel; ++i) at[i] = q + place(lane + i, rows, group, job.heads) * head_dim;
                Turned::panel(at, head_dim, memory.queries + (head * lanes + lane) * int64_t{head_dim});
            }
        }
    }

    // Row `lane` of a KV head, counted in heads from the first query's first. The last panel repeats its last row.
    static int64_t place(int lane, int rows, int group, int heads) {
        const int row = lane < rows ? lane : rows - 1;
        return int64_t{row / group} * heads + row % group;
    }

    static int position(const Attention& job, int lane, int rows) {
        return job.position + (lane < rows ? lane : rows - 1) / (job.heads / job.kv->kv_heads);
    }

    // Keys and values [key, last) of the next block; a core drops what is asked for all at once.
    static void fetch(const Attention& job, int head, int key, int last) {
        if (last > job.last_key) last = job.last_key;
        if (key >= last) return;
        const Weight *key_rows[kBlock], *value_rows[kBlock];
        locate<Weight>(job, key, last - key, 0, head, nullptr, key_rows, value_rows);
        for (int i = 0; i < last - key; ++i) {
            for (int dim = 0; dim < job.kv->head_dim; dim += 64 / int{sizeof(Weight)}) {
                __builtin_prefetch(key_rows[i] + dim, 0, 2);
                __builtin_prefetch(value_rows[i] + dim, 0, 2);
            }
        }
    }

    static void prepare_block(const Attention& job, Memory& memory, int key, int keys, int head) {
        const int head_dim = job.kv->head_dim;
        const int whole = (keys + Turned::square_rows - 1) / Turned::square_rows * Turned::square_rows;
        const Weight *key_rows[kBlock], *value_rows[kBlock];
        locate(job, key, keys, whole, head, memory.zeros, key_rows, value_rows);
        for (int i = 0; i < keys; ++i) {
            convert_all<Isa>(key_rows[i], memory.keys + i * head_dim, head_dim);
        }
        Turned::columns(value_rows, whole, head_dim, memory.values, kBlock);
    }

    // What `count` panels see of the block.
    static void add_block(
        const Attention& job, Memory& memory, int first_panel, int panel, int count, int rows, int key, int keys
    ) {
        const int head_dim = job.kv->head_dim, window = job.kv->window;
        const int first = position(job, panel * kPanel, rows);
        const int last = position(job, (panel + count) * kPanel - 1, rows);
        const int oldest = window ? first - window + 1 - key : 0;
        const int from = oldest > 0 ? oldest / pack<In> * pack<In> : 0;
        const int to = last + 1 - key < keys ? last + 1 - key : keys;
        if (from >= to) return;

        const char *queries[together], *weights[together];
        for (int i = 0; i < count; ++i) {
            queries[i] = reinterpret_cast<const char*>(
                memory.queries + int64_t{first_panel + panel + i} * kPanel * head_dim);
            weights[i] = reinterpret_cast<const char*>(memory.weights + i * kBlock * kPanel + from * kPanel);
        }
        Product::template compute_into<false>(queries, count, memory.keys + from * head_dim, head_dim, to - from,
                                              head_dim, memory.scores + from * kPanel, kBlock * kPanel);
        const int all_from = window ? last - window + 1 - key : 0;  // seen by all lanes
        const int all_to = first + 1 - key;
        for (int i = 0; i < count; ++i) {
            float* scores = memory.scores + i * kBlock * kPanel;
            const uint32_t* positions = memory.positions + (panel + i) * kPanel;
            const float factor = finish_scores(scores, from, to, *job.kv);
            mask(scores, from, all_from < to ? all_from : to, positions, key, window);
            mask(scores, all_to > from ? all_to : from, to, positions, key, window);
            const int64_t at = (first_panel + panel + i) * kPanel;
            weigh(scores, from, to, factor, memory.highest + at, memory.total + at, memory.sums + at * head_dim,
                  head_dim, memory.weights + i * kBlock * kPanel);
        }
        const int depth = (to - from + pack<In> - 1) / pack<In> * pack<In>;
        float* sums = memory.sums + int64_t{first_panel + panel} * kPanel * head_dim;
        Product::template compute_into<true>(weights, count, memory.values + from, kBlock, head_dim, depth, sums,
                                             int64_t{kPanel} * head_dim);
    }

    // Returns what they are to be multiplied by so that they are in bits.
    static float finish_scores(float* scores, int from, int to, const PagedKV& kv) {
        if (kv.soft_cap == 0) return kv.scale * kLog2e;
        for (int i = from * kPanel; i < to * kPanel; i += width) {
            store(scores + i, tanh<Isa>(load<F>(scores + i) * (kv.scale / kv.soft_cap)));
        }
        return kv.soft_cap * kLog2e;
    }

    // Hide keys [from, to) of the block from lanes that may not see them.
    static void mask(float* scores, int from, int to, const uint32_t* positions, int key, int window) {
        const uint32_t seen = window ? window : INT32_MAX;
        for (int i = from; i < to; ++i) {
            for (int lane = 0; lane < kPanel; lane += width) {
                // Of a later key the difference wraps around.
                const U age = load<U>(positions + lane) - static_cast<uint32_t>(key + i);
                float* score = scores + i * kPanel + lane;
                store(score, age < seen ? load<F>(score) : all<Isa>(-__builtin_inff()));
            }
        }
    }

    // Scores [from, to) of a panel to weights.
    static void weigh(
        const float* scores, int from, int to, float factor, float* highest, float* total, float* sums, int head_dim,
        In* weights
    ) {
        for (int lane = 0; lane < kPanel; lane += width) {
            F base = load<F>(highest + lane);
            const F top = most(scores + lane, from, to) * factor;
            if (any<Isa>(top > base + kSlack)) {
                const F raised = Isa::max(top, base);
                const F shrink = exp2<Isa, In>(base - raised);
                store(total + lane, load<F>(total + lane) * shrink);
                for (int i = 0; i < head_dim; ++i) {
                    float* sum = sums + i * kPanel + lane;
                    store(sum, load<F>(sum) * shrink);
                }
                store(highest + lane, raised);
                base = raised;
            }
            F parts[chains] = {load<F>(total + lane)};
            int i = from;
            for (; i + chains * pack<In> <= to; i += chains * pack<In>) {
#pragma GCC unroll 4
                for (int k = 0; k < chains; ++k) {
                    weigh_some<pack<In>>(scores + lane, i + k * pack<In>, factor, base, weights, lane, parts[k]);
                }
            }
            for (; i + pack<In> <= to; i += pack<In>) {
                weigh_some<pack<In>>(scores + lane, i, factor, base, weights, lane, parts[0]);
            }
            if (i < to) weigh_some<1>(scores + lane, i, factor, base, weights, lane, parts[0]);
            for (int k = 1; k < chains; ++k) parts[0] += parts[k];
            store(total + lane, parts[0]);
        }
    }

    static F most(const float* scores, int from, int to) {
        F top[chains];
        for (int k = 0; k < chains; ++k) top[k] = load<F>(scores + from * kPanel);
        int i = from;
        for (; i + chains <= to; i += chains) {
#pragma GCC unroll 4
            for (int k = 0; k < chains; ++k) top[k] = Isa::max(top[k], load<F>(scores + (i + k) * kPanel));
        }
        for (; i < to; ++i) top[0] = Isa::max(top[0], load<F>(scores + i * kPanel));
        for (int k = 1; k < chains; ++k) top[0] = Isa::max(top[0], top[k]);
        return top[0];
    }

    // The weights of `Keys` keys, at most `pack`; the rest of them are zero. What is summed is what is multiplied.
    template <int Keys>
    static inline __attribute__((always_inline)) void weigh_some(
        const float* scores, int key, float factor, F base, In* weights, int lane, F& sum
    ) {
        char* out = reinterpret_cast<char*>(weights + key * kPanel) + lane * 4;
        const F weight = exp2<Isa, In>(load<F>(scores + key * kPanel) * factor - base);
        if constexpr (sizeof(In) == 4) {
            sum += weight;
            store(out, weight);
        } else {
            F next = {};
            if (Keys > 1) next = exp2<Isa, In>(load<F>(scores + (key + 1) * kPanel) * factor - base);
            const U both = round_pair<Isa>(weight, next);
            sum = Isa::dot(sum, both, all_bits<Isa>(0x3f803f80u));  // ones
            store(out, both);
        }
    }

    static void finish(const Attention& job, Memory& memory, int heads, int rows, int panels) {
        const int head_dim = job.kv->head_dim, group = job.heads / job.kv->kv_heads, lanes = panels * kPanel;
        for (int head = 0; head < heads; ++head) {
            for (int lane = 0; lane < lanes; lane += kPanel) {
                const int at = head * lanes + lane;
                const float* sums = memory.sums + int64_t{at} * head_dim;
                const int64_t first = (job.first_head + head) * group;
                if (job.partial) {
                    alignas(64) float ones[kPanel];
                    float* out[kPanel];
                    for (int i = 0; i < kPanel; ++i) {
                        ones[i] = 1;
                        out[i] = job.partial + (first + place(lane + i, rows, group, job.heads)) * (head_dim + 2);
                        out[i][0] = memory.highest[at + i] / kLog2e;
                        out[i][1] = memory.total[at + i];
                        out[i] += 2;
                    }
                    Turned::rows(sums, ones, head_dim, out);
                } else {
                    alignas(64) float share[kPanel];
                    In* out[kPanel];
                    for (int i = 0; i < kPanel; ++i) {
                        share[i] = 1 / memory.total[at + i];
                        out[i] = static_cast<In*>(job.out) +
                                 (first + place(lane + i, rows, group, job.heads)) * head_dim;
                    }
                    Turned::rows(sums, share, head_dim, out);
                }
            }
        }
    }
};

}  // namespace
}  // namespace kvrelay
