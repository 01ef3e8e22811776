// Norm, rotation and storage of a token's q, k and v.
#pragma once

#include "kernel_table.h"
#include "norms.h"

namespace kvrelay {
namespace {

// One head of a token, halves paired. `norm` may be null.
template <class Out>
inline void turn_head(const float* x, const float* norm, float eps, const float* cos_sin, Out* out, int head_dim) {
    const int half = head_dim / 2;
    const float scale = norm ? inverse_rms(x, head_dim, eps) : 1.0f;
#pragma omp simd
    for (int i = 0; i < half; ++i) {
        const float first = norm ? x[i] * scale * norm[i] : x[i];
        const float second = norm ? x[half + i] * scale * norm[half + i] : x[half + i];
        narrow(first * cos_sin[i] - second * cos_sin[half + i], out[i]);
        narrow(second * cos_sin[i] + first * cos_sin[half + i], out[half + i]);
    }
}

template <class In, class Weight>
void turn(const float* qkv, const HeadShape& shape, const float* cos_sin, void* q, void* key, void* value) {
    const int dim = shape.head_dim;
    for (int head = 0; head < shape.heads; ++head, qkv += dim) {
        turn_head(qkv, shape.q_norm, shape.eps, cos_sin, static_cast<In*>(q) + head * dim, dim);
    }
    for (int head = 0; head < shape.kv_heads; ++head, qkv += dim) {
        turn_head(qkv, shape.k_norm, shape.eps, cos_sin, static_cast<Weight*>(key) + head * dim, dim);
    }
    Weight* values = static_cast<Weight*>(value);
#pragma omp simd
    for (int i = 0; i < shape.kv_heads * dim; ++i) narrow(qkv[i], values[i]);
}

}  // namespace
}  // namespace kvrelay
