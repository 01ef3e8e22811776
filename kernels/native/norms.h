// Root mean square norms.
#pragma once

#include "isa.h"

namespace kvrelay {
namespace {

inline float inverse_rms(const float* x, int width, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < width; ++i) squares += x[i] * x[i];
    return 1.0f / __builtin_sqrtf(squares / width + eps);
}

template <class Isa, class Out>
inline void rms_norm(const float* x, const float* weight, void* to, int width, float eps) {
    using F = typename Isa::F;
    Out* out = static_cast<Out*>(to);
    const float scale = inverse_rms(x, width, eps);
    int i = 0;
    for (; i + Isa::width <= width; i += Isa::width) {
        store_float<Isa>(out + i, load<F>(x + i) * scale * load<F>(weight + i));
    }
    for (; i < width; ++i) narrow(x[i] * scale * weight[i], out[i]);
}

}  // namespace
}  // namespace kvrelay
