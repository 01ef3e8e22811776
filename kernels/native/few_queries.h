// Attention of a few rows of queries (a query of one head is a row), in one pass with a running softmax, straight from
// the pages: packing a block of keys would cost more than all its products. It is bound by memory, see `ReadAhead`.
#pragma once

#include <utility>

#include "isa.h"
#include "paged_rows.h"
#include "read_ahead.h"

namespace kvrelay {
namespace {

template <class Isa, class Weight>
struct FewQueries {
    using F = typename Isa::F;
    using U = typename Isa::U;
    using In = Input<Isa, Weight>;

    static constexpr int width = Isa::width;
    static constexpr int lane_values = pack<Weight>;
    static constexpr int vector_values = width * lane_values;  // weights in one vector
    static constexpr int step = sizeof(In) == 2 ? 2 : 1;       // values that are multiplied at a time
    static constexpr int kMostRows = 8;                        // of one KV head; with more of them packing pays
    static constexpr int kBlock = 64;        // keys at a time: they, and the next ones, stay in the cache
    static constexpr int kTile = width / 2;  // keys at a time, whose sums for three rows are in registers
    static constexpr float kLog2e = 1.44269504f;

    // What parts of the work cost beyond their products, in about as many operations: the pace of `ReadAhead`.
    static constexpr int kSumsCost = 30, kRowCost = 40, kWeightsCost = 20;

    // `rows` of one KV head.
    static bool fits(int rows, int head_dim) {
        return rows <= kMostRows && head_dim >= vector_values && head_dim % lane_values == 0;
    }

    // A head in whole vectors: the last one may overlap the one before.
    struct Head {
        int dims, vectors, slots;

        explicit Head(int head_dim)
            : dims(head_dim), vectors((head_dim + vector_values - 1) / vector_values), slots(vectors * vector_values) {}

        int start(int vector) const {
            const int at = vector * vector_values;
            return at + vector_values <= dims ? at : dims - vector_values;
        }
    };

    // Of the rows of all heads. `slots` are in the order in which the lanes of a vector are multiplied.
    struct Memory {
        Weight* zeros;   // [heads, head_dim]: a token that is not there
        In* queries;     // [rows, slots]
        float* scores;   // [rows, kBlock]
        In* weights;     // [rows, kBlock]
        float* highest;  // [rows]: score, in bits
        float* total;    // [rows]
        float* shrink;   // [rows]: what a new highest score does to earlier sums
        float* sums;     // [rows, slots]
    };

    template <class Take>
    static void lay_out(Memory& memory, int rows, int head_dim, Take take) {
        const int slots = Head(head_dim).slots;
        take(memory.zeros, rows * head_dim);
        take(memory.queries, rows * slots);
        take(memory.scores, rows * kBlock);
        take(memory.weights, rows * kBlock);
        take(memory.highest, rows);
        take(memory.total, rows);
        take(memory.shrink, rows);
        take(memory.sums, rows * slots);
    }

    // Of memory for `rows` of all heads.
    static size_t bytes(int rows, int head_dim) {
        Memory memory;
        size_t total = 64;
        lay_out(memory, rows, head_dim, [&](auto& at, size_t count) { total += (count * sizeof(*at) + 63) / 64 * 64; });
        return total;
    }

    // The keys and values of a block, from the job's first head on.
    struct Block {
        int first, keys, padded;
        const Weight *key[kBlock], *value[kBlock];
    };

    // ---- the pass

    static int rows_of(const Attention& job) { return job.heads / job.kv->kv_heads * job.queries; }

    static void attend(const Attention& job, void* given) {
        const Head head(job.kv->head_dim);
        const int heads = job.last_head - job.first_head, each = rows_of(job), rows = heads * each;
        Memory memory;
        char* next = static_cast<char*>(given) + (64 - reinterpret_cast<uintptr_t>(given) % 64) % 64;
        lay_out(memory, rows, head.dims, [&](auto& at, size_t count) {
            at = reinterpret_cast<std::remove_reference_t<decltype(at)>>(next);
            next += (count * sizeof(*at) + 63) / 64 * 64;
        });
        std::memset(static_cast<void*>(memory.zeros), 0, heads * head.dims * sizeof(Weight));
        std::memset(memory.total, 0, rows * sizeof(float));
        std::memset(memory.sums, 0, rows * head.slots * sizeof(float));
        for (int i = 0; i < rows; ++i) memory.highest[i] = kLowest;
        gather_queries(job, head, memory.queries);

        if (!job.fetched) ReadAhead(job, job.first_key, end_of(job, job.first_key), 1).rest();
        for (int key = job.first_key; key < job.last_key; key += kBlock) {
            const Block block = locate(job, key, memory.zeros);
            ReadAhead ahead = ahead_of(job, end_of(job, key), operations(heads, each, head, block.padded));
            for (int first = 0; first < block.padded; first += kTile) {
                for (int i = 0; i < heads; ++i) score(block, first, head, memory, i, each, ahead);
            }
            for (int row = 0; row < rows; ++row) {
                weigh(job, block, memory, row, each);
                ahead.after(kRowCost + block.padded / width * kWeightsCost);
            }
            for (int i = 0; i < heads; ++i) add_values(block, head, memory, i, each, ahead);
            ahead.rest();
        }
        finish(job, head, memory, heads, each);
    }

    static int end_of(const Attention& job, int key) {
        return job.last_key - key < kBlock ? job.last_key : key + kBlock;
    }

    // The block from `key` on or, after the last one, the next job's first.
    static ReadAhead ahead_of(const Attention& job, int key, int operations) {
        Attention* next = job.next;
        if (key < job.last_key || !next || !fits(rows_of(*next), job.kv->head_dim)) {
            return {job, key, end_of(job, key), operations};
        }
        next->fetched = true;
        return {*next, next->first_key, end_of(*next, next->first_key), operations};
    }

    static int operations(int heads, int each, const Head& head, int keys) {
        const int scores = keys / kTile * (kTile * head.vectors + kSumsCost);
        const int weights = kRowCost + keys / width * kWeightsCost;
        const int values = keys / step * head.vectors;
        return heads * (each * (scores + weights) + values * each * lane_values);
    }

    static Block locate(const Attention& job, int key, const Weight* zeros) {
        Block block;
        block.first = key;
        block.keys = end_of(job, key) - key;
        block.padded = (block.keys + kPanel - 1) / kPanel * kPanel;
        kvrelay::locate(job, key, block.keys, block.padded, job.first_head, zeros, block.key, block.value);
        return block;
    }

    // The rows of a KV head lie together, query by query.
    static void gather_queries(const Attention& job, const Head& head, In* to) {
        const int group = job.heads / job.kv->kv_heads;
        for (int kv_head = job.first_head; kv_head < job.last_head; ++kv_head) {
            for (int query = 0; query < job.queries; ++query) {
                const int first = query * job.heads + kv_head * group;
                const In* from = static_cast<const In*>(job.q) + int64_t{first} * head.dims;
                for (int i = 0; i < group; ++i, from += head.dims, to += head.slots) order(from, head, to);
            }
        }
    }

    // Zero where the last vector overlaps; evens before odds where their products are summed apart.
    static void order(const In* from, const Head& head, In* to) {
        for (int vector = 0; vector < head.vectors; ++vector, to += vector_values) {
            const int start = head.start(vector), overlap = vector * vector_values - start;
            for (int i = 0; i < vector_values; ++i) {
                const int slot = sizeof(In) == sizeof(Weight) ? i : i / lane_values + i % lane_values * width;
                to[slot] = i < overlap ? In{} : from[start + i];
            }
        }
    }

    // Up to three rows go together; four are twice two, not three and one.
    static int together(int rows) { return rows == 4 || rows == 2 ? 2 : rows == 1 ? 1 : 3; }

    // ---- scores

    static void score(
        const Block& block, int first, const Head& head, Memory& memory, int kv_head, int each, ReadAhead& ahead
    ) {
        const Weight* const* keys = block.key + first;
        const int offset = kv_head * head.dims, last = (kv_head + 1) * each;
        for (int row = kv_head * each; row < last; row += together(last - row)) {
            const In* q = memory.queries + row * head.slots;
            float* scores = memory.scores + row * kBlock + first;
            switch (together(last - row)) {
                case 1: score_rows<1>(keys, offset, head, q, scores, ahead); break;
                case 2: score_rows<2>(keys, offset, head, q, scores, ahead); break;
                default: score_rows<3>(keys, offset, head, q, scores, ahead);
            }
        }
    }

    template <int Rows>
    static void score_rows(
        const Weight* const* keys, int offset, const Head& head, const In* q, float* scores, ReadAhead& ahead
    ) {
        F sum[Rows][kTile];
#pragma GCC unroll 4
        for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 8
            for (int i = 0; i < kTile; ++i) sum[row][i] = F{};  // `= {}` would put them in memory
        }
        for (int vector = 0; vector < head.vectors; ++vector, q += vector_values) {
            const int dim = offset + head.start(vector);
            Query query[Rows];
#pragma GCC unroll 4
            for (int row = 0; row < Rows; ++row) query[row] = Query(q + row * head.slots);
#pragma GCC unroll 8
            for (int i = 0; i < kTile; ++i) {
                const U key = load<U>(keys[i] + dim);
#pragma GCC unroll 4
                for (int row = 0; row < Rows; ++row) sum[row][i] = query[row].add(sum[row][i], key);
            }
            ahead.after(kTile * Rows);
        }
#pragma GCC unroll 4
        for (int row = 0; row < Rows; ++row) {
            store_sums(sum[row], scores + row * kBlock);
            ahead.after(kSumsCost);
        }
    }

    // One vector of a query.
    struct Query {
        F lanes[sizeof(In) == sizeof(Weight) ? 1 : lane_values];

        Query() = default;

        inline __attribute__((always_inline)) explicit Query(const In* from) {
            for (size_t i = 0; i < sizeof lanes / sizeof(F); ++i) lanes[i] = load<F>(from + i * width);
        }

        // Add the products with a vector of a key.
        inline __attribute__((always_inline)) F add(F sum, U key) const {
            if constexpr (sizeof(In) == 2) {
                return Isa::dot(sum, key, (U)lanes[0]);
            } else if constexpr (sizeof(Weight) == 4) {
                return sum + (F)key * lanes[0];
            } else {
                return sum + (F)(key << 16) * lanes[0] + (F)(key & 0xffff0000u) * lanes[1];
            }
        }
    };

    // The sums of `kTile` vectors, in order. Two are interleaved and their halves added, until one is left.
    static inline __attribute__((always_inline)) void store_sums(F (&x)[kTile], float* to) {
#pragma GCC unroll 4
        for (int half = kTile / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
            for (int i = 0; i < half; ++i) {
                U low, high;
                Isa::interleave((U)x[i], (U)x[i + half], low, high);
                x[i] = (F)low + (F)high;
            }
        }
        const F sums = x[0] + crossed<kTile>(x[0]);
        std::memcpy(to, &sums, kTile * sizeof(float));
    }

    // x[i ^ distance] in lane i.
    template <int distance>
    static inline __attribute__((always_inline)) F crossed(F x) {
        return shuffled<distance>(x, std::make_integer_sequence<uint32_t, width>());
    }

    template <int distance, uint32_t... lanes>
    static inline __attribute__((always_inline)) F shuffled(F x, std::integer_sequence<uint32_t, lanes...>) {
        return __builtin_shuffle(x, U{(lanes ^ distance)...});  // a loop over lanes would insert one by one
    }

    // All lanes combined, in each of them.
    template <int distance = width / 2, class Combine>
    static inline __attribute__((always_inline)) F folded(F x, Combine combine) {
        if constexpr (distance == 0) return x;
        else return folded<distance / 2>(combine(x, crossed<distance>(x)), combine);
    }

    // ---- weights

    // Scores to weights; earlier sums are to be multiplied by `shrink`.
    static void weigh(const Attention& job, const Block& block, Memory& memory, int row, int each) {
        const PagedKV& kv = *job.kv;
        const int position = job.position + row % each / (job.heads / kv.kv_heads);
        const int oldest = kv.window ? position - kv.window + 1 : 0;
        const int first = oldest > block.first ? oldest - block.first : 0;
        const int last = position + 1 - block.first < block.keys ? position + 1 - block.first : block.keys;
        float* scores = memory.scores + row * kBlock;
        In* weights = memory.weights + row * kBlock;
        if (first >= last) {
            std::memset(static_cast<void*>(weights), 0, block.padded * sizeof(In));
            memory.shrink[row] = 1.0f;
            return;
        }
        to_bits(scores, block.padded, kv);
        for (int i = 0; i < first; ++i) scores[i] = kLowest;
        for (int i = last; i < block.padded; ++i) scores[i] = kLowest;
        F top = all<Isa>(memory.highest[row]);
        for (int i = 0; i < block.padded; i += width) top = Isa::max(top, load<F>(scores + i));
        const float before = memory.highest[row], highest = highest_of(top);
        F total = {};
        for (int i = 0; i < block.padded; i += width) {
            const F weight = exp2<Isa, In>(load<F>(scores + i) - highest);
            total += weight;
            store_float<Isa>(weights + i, weight);
        }
        const float shrink = exp2<Isa, float>(all<Isa>(before - highest))[0];
        memory.shrink[row] = shrink;
        memory.highest[row] = highest;
        memory.total[row] = memory.total[row] * shrink + total_of(total);
    }

    static void to_bits(float* scores, int keys, const PagedKV& kv) {
        if (kv.soft_cap > 0) {
            const float to_cap = kv.scale / kv.soft_cap, to_bits = kv.soft_cap * kLog2e;
            for (int i = 0; i < keys; i += width) store(scores + i, tanh<Isa>(load<F>(scores + i) * to_cap) * to_bits);
        } else {
            const float to_bits = kv.scale * kLog2e;
            for (int i = 0; i < keys; i += width) store(scores + i, load<F>(scores + i) * to_bits);
        }
    }

    static float highest_of(F x) {
        return folded(x, [](F a, F b) { return Isa::max(a, b); })[0];
    }

    static float total_of(F x) {
        return folded(x, [](F a, F b) { return a + b; })[0];
    }

    // ---- values

    static void add_values(
        const Block& block, const Head& head, Memory& memory, int kv_head, int each, ReadAhead& ahead
    ) {
        const int offset = kv_head * head.dims, last = (kv_head + 1) * each;
        for (int row = kv_head * each; row < last; row += together(last - row)) {
            switch (together(last - row)) {
                case 1: add_rows<1>(block, offset, head, memory, row, ahead); break;
                case 2: add_rows<2>(block, offset, head, memory, row, ahead); break;
                default: add_rows<3>(block, offset, head, memory, row, ahead);
            }
        }
    }

    template <int Rows>
    static void add_rows(const Block& block, int offset, const Head& head, Memory& memory, int row, ReadAhead& ahead) {
        int vector = 0;
        for (; vector + 2 <= head.vectors; vector += 2) {
            add_vectors<2, Rows>(block, offset, head, vector, memory, row, ahead);
        }
        if (vector < head.vectors) add_vectors<1, Rows>(block, offset, head, vector, memory, row, ahead);
    }

    // In bfloat16 even and odd dimensions are summed apart, which needs no shuffles.
    template <int Vectors, int Rows>
    static void add_vectors(
        const Block& block, int offset, const Head& head, int vector, Memory& memory, int first_row, ReadAhead& ahead
    ) {
        int dim[Vectors];
        for (int part = 0; part < Vectors; ++part) dim[part] = offset + head.start(vector + part);
        F sum[Rows][Vectors][lane_values] = {};
        for (int key = 0; key < block.padded; key += step) {
#pragma GCC unroll 2
            for (int part = 0; part < Vectors; ++part) {
                F value[lane_values];
                spread(block.value + key, dim[part], value);
#pragma GCC unroll 4
                for (int row = 0; row < Rows; ++row) {
                    const In* weight = memory.weights + (first_row + row) * kBlock + key;
#pragma GCC unroll 2
                    for (int i = 0; i < lane_values; ++i) {
                        F& to = sum[row][part][i];
                        if constexpr (sizeof(In) == 2) {
                            to = Isa::dot(to, (U)value[i], all_bits<Isa>(load<uint32_t>(weight)));
                        } else {
                            to += value[i] * *weight;
                        }
                    }
                }
            }
            ahead.after(Vectors * Rows * lane_values);
        }
        for (int row = 0; row < Rows; ++row) {
            for (int part = 0; part < Vectors; ++part) {
                for (int i = 0; i < lane_values; ++i) {
                    float* to = memory.sums + (first_row + row) * head.slots;
                    to += (vector + part) * vector_values + i * width;
                    store(to, load<F>(to) * memory.shrink[first_row + row] + sum[row][part][i]);
                }
            }
        }
    }

    // Even and odd dimensions: of two tokens side by side where they are multiplied in pairs, else as float32.
    static inline __attribute__((always_inline)) void spread(
        const Weight* const* rows, int dim, F (&value)[lane_values]
    ) {
        const U first = load<U>(rows[0] + dim);
        if constexpr (sizeof(Weight) == 4) {
            value[0] = (F)first;
        } else if constexpr (sizeof(In) == 2) {
            const U second = load<U>(rows[1] + dim);
            value[0] = (F)((first & 0xffffu) | (second << 16));
            value[1] = (F)((first >> 16) | (second & 0xffff0000u));
        } else {
            value[0] = (F)(first << 16);
            value[1] = (F)(first & 0xffff0000u);
        }
    }

    // ---- results

    static void finish(const Attention& job, const Head& head, const Memory& memory, int heads, int each) {
        const int group = job.heads / job.kv->kv_heads;
        for (int row = 0; row < heads * each; ++row) {
            const int64_t query = row % each / group;
            const int64_t at = query * job.heads + (job.first_head + row / each) * group + row % group;
            const float* sums = memory.sums + row * head.slots;
            if (job.partial) {
                float* out = job.partial + at * (head.dims + 2);
                out[0] = memory.highest[row] / kLog2e;
                out[1] = memory.total[row];
                write(sums, head, 1.0f, out + 2);
            } else {
                write(sums, head, 1.0f / memory.total[row], static_cast<In*>(job.out) + at * head.dims);
            }
        }
    }

    template <class Out>
    static void write(const float* sums, const Head& head, float scale, Out* out) {
        for (int vector = 0; vector < head.vectors; ++vector, sums += vector_values) {
            Out* to = out + head.start(vector);
            const F first = load<F>(sums) * scale;
            if constexpr (lane_values == 1) {
                store_float<Isa>(to, first);
            } else {
                U low, high;
                Isa::interleave((U)first, (U)(load<F>(sums + width) * scale), low, high);
                store_float<Isa>(to, (F)low);
                store_float<Isa>(to + width, (F)high);
            }
        }
    }
};

}  // namespace
}  // namespace kvrelay
