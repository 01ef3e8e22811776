// The table of one instruction set, for the units `isa_*.cpp`.
#pragma once

#include "attention.h"
#include "gemm.h"
#include "limits.h"
#include "norms.h"
#include "rope.h"

namespace kvrelay {
namespace {

template <class From, class To>
void convert(const void* from, void* to, int64_t count) {
    const From* x = static_cast<const From*>(from);
    To* out = static_cast<To*>(to);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) narrow(widen(x[i]), out[i]);
}

template <class From>
void widen_all(const void* from, float* to, int64_t count) {
    convert<From, float>(from, to, count);
}

template <class To>
void narrow_all(const float* from, void* to, int64_t count) {
    convert<float, To>(from, to, count);
}

template <class Isa>
void silu_and_mul(const float* gate, const float* up, float* out, int width) {
    int i = 0;
    for (; i + Isa::width <= width; i += Isa::width) {
        store_float<Isa>(out + i, silu<Isa>(load_float<Isa>(gate + i)) * load_float<Isa>(up + i));
    }
    for (; i < width; ++i) out[i] = silu<Isa>(all<Isa>(gate[i]))[0] * up[i];
}

template <class Weight>
constexpr Dtype dtype_of = sizeof(Weight) == 2 ? Dtype::bf16 : Dtype::f32;

template <class Isa, class Weight>
constexpr KernelTable table_of(const char* isa) {
    using In = Input<Isa, Weight>;
    return {
        isa,
        dtype_of<Weight>,
        dtype_of<In>,
        rms_norm<In>,
        Gemm<Isa, Weight>::product,
        PagedAttention<Isa, Weight>::bytes,
        PagedAttention<Isa, Weight>::attend,
        PagedAttention<Isa, Weight>::merge,
        turn<In, Weight>,
        silu_and_mul<Isa>,
        widen_all<Weight>,
        narrow_all<Weight>,
        narrow_all<In>,
        widen_all<In>,
        read_all<Isa>,
        multiply<Isa, Weight>,
    };
}

}  // namespace
}  // namespace kvrelay
