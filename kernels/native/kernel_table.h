// What each instruction set offers: one table of functions per type of the weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "packed_matrix.h"

namespace kvrelay {

// A product of activations with panels [first, last) of a matrix.
//
// `x` [rows, depth] is of the table's input type. With `up` the result is silu(x w) * (x up), of the input type;
// otherwise it is float32, with `bias` added, and `add` says that it is added to what `out` holds. `memory` is
// `product_bytes` of the caller's own.
struct Product {
    const void* x;
    int rows;
    const PackedMatrix* matrix;
    const PackedMatrix* up;
    int first, last;
    const float* bias;
    void* out;
    int64_t out_stride;  // values
    bool add;
    void* memory = nullptr;
};

// Keys and values of one layer in their pages, and how their scores are made.
//
// Token t of a request has its key in row `table[t / page_size] * 2 * page_size + t % page_size` of `pool`, a
// row being `kv_heads * head_dim` values, and its value `page_size` rows later.
struct PagedKV {
    const void* pool;
    Dtype dtype;
    int page_size, kv_heads, head_dim;
    float scale;
    float soft_cap;  // 0: none
    int window;      // tokens a token sees, itself included; 0: all
};

// Queries [position, position + queries) of one request, for KV heads [first_head, last_head), over its tokens
// [first_key, last_key). `q` and `out` are the first query's row, [heads, head_dim] of the input type.
//
// With `partial` the result stays unfinished: per query and head the highest score, the sum of weights, and the
// weighted values in float32, `head_dim + 2` in all.
struct Attention {
    const PagedKV* kv;
    const int32_t* table;
    const void* q;
    void* out;
    float* partial;
    int heads;
    int position, queries;
    int first_head, last_head;
    int first_key, last_key;
    Attention* next;  // that the same thread turns to afterwards, or null
    bool fetched;     // its first keys and values are in the cache: the one before has seen to it
};

// How each head of q and k is turned and stored.
struct HeadShape {
    int heads, kv_heads, head_dim;
    const float* q_norm;  // [head_dim] or null
    const float* k_norm;
    float eps;
};

struct KernelTable {
    const char* isa;
    Dtype weights;
    Dtype input;          // of activations that are multiplied
    bool narrow_weights;  // bfloat16 may be packed as bf12

    // `x / rms(x) * weight` over `width` values.
    void (*rms_norm)(const float* x, const float* weight, void* out, int width, float eps);
    size_t (*product_bytes)(const PackedMatrix& matrix, int rows);
    void (*product)(const Product&);
    // Bytes of memory that `attend` needs of its caller. `lanes`: queries times heads, of each KV head filled up to
    // whole panels.
    size_t (*attend_bytes)(int lanes, int head_dim);
    void (*attend)(const Attention&, void* memory);
    // Combine `parts` unfinished results of one query, `stride` floats apart, into `out`.
    void (*merge)(const float* partial, int parts, int64_t stride, int heads, int head_dim, void* out);
    // Norm and rotate one token's `qkv`, write q of the input type, and k and v to `key` and `value` in the pool.
    void (*turn)(const float* qkv, const HeadShape&, const float* cos_sin, void* q, void* key, void* value);
    void (*silu_and_mul)(const float* gate, const float* up, float* out, int width);
    // Between the type of weights, the input type and float32.
    void (*widen)(const void* weights, float* out, int64_t count);
    void (*narrow)(const float* x, void* weights, int64_t count);
    void (*to_input)(const float* x, void* input, int64_t count);
    void (*from_input)(const void* input, float* out, int64_t count);

    // The machine's limits: read `bytes` in one of several ways, multiply in registers.
    uint32_t (*read_all)(const char* data, size_t bytes, int variant);
    int64_t (*multiply)(int rounds);
};

constexpr int kReadVariants = 6;

// The instruction sets this machine can run, widest first.
std::vector<std::string> usable_isas();

// Throws std::invalid_argument that lists the usable ones.
const KernelTable& kernel_table(const std::string& isa, Dtype weights);

}  // namespace kvrelay
