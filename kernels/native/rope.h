// Norm, rotation and storage of a token's q, k and v.
#pragma once

#include "kernel_table.h"
#include "norms.h"

namespace kvrelay {
namespace {

// One head of a token, halves paired. `norm` may be null.
template <class Isa, class Out>
inline void turn_head(const float* x, const float* norm, float eps, const float* cos_sin, Out* out, int head_dim) {
    using F = typename Isa::F;
    const int half = head_dim / 2;
    const float scale = norm ? inverse_rms(x, head_dim, eps) : 1.0f;
    const float *cos = cos_sin, *sin = cos_sin + half;
    int i = 0;
    for (; i + Isa::width <= half; i += Isa::width) {
        F first = load<F>(x + i), second = load<F>(x + half + i);
        if (norm) {
            first *= load<F>(norm + i) * scale;
            second *= load<F>(norm + half + i) * scale;
        }
        store_float<Isa>(out + i, first * load<F>(cos + i) - second * load<F>(sin + i));
        store_float<Isa>(out + half + i, second * load<F>(cos + i) + first * load<F>(sin + i));
    }
    for (; i < half; ++i) {
        const float first = norm ? x[i] * scale * norm[i] : x[i];
        const float second = norm ? x[half + i] * scale * norm[half + i] : x[half + i];
        narrow(first * cos[i] - second * sin[i], out[i]);
        narrow(second * cos[i] + first * sin[i], out[half + i]);
    }
}

template <class Isa, class In, class Weight>
void turn(const float* qkv, const HeadShape& shape, const float* cos_sin, void* q, void* key, void* value) {
    const int dim = shape.head_dim;
    for (int head = 0; head < shape.heads; ++head, qkv += dim) {
        turn_head<Isa>(qkv, shape.q_norm, shape.eps, cos_sin, static_cast<In*>(q) + head * dim, dim);
    }
    for (int head = 0; head < shape.kv_heads; ++head, qkv += dim) {
        turn_head<Isa>(qkv, shape.k_norm, shape.eps, cos_sin, static_cast<Weight*>(key) + head * dim, dim);
    }
    convert_all<Isa>(qkv, static_cast<Weight*>(value), shape.kv_heads * dim);
}

}  // namespace
}  // namespace kvrelay
