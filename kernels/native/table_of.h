// The table of one instruction set, for the units `isa_*.cpp`.
#pragma once

#include "attention.h"
#include "bf12_gemm.h"
#include "limits.h"
#include "norms.h"
#include "quantized_gemm.h"
#include "rope.h"

namespace kvrelay {
namespace {

template <class Isa, class From>
void widen_all(const void* from, float* to, int64_t count) {
    convert_all<Isa>(static_cast<const From*>(from), to, count);
}

template <class Isa, class To>
void narrow_all(const float* from, void* to, int64_t count) {
    convert_all<Isa>(from, static_cast<To*>(to), count);
}

template <class Isa>
void silu_and_mul(const float* gate, const float* up, float* out, int width) {
    int i = 0;
    for (; i + Isa::width <= width; i += Isa::width) {
        store_float<Isa>(out + i, silu<Isa>(load_float<Isa>(gate + i)) * load_float<Isa>(up + i));
    }
    for (; i < width; ++i) out[i] = silu<Isa>(all<Isa>(gate[i]))[0] * up[i];
}

// Whether matrices in bf12 can be read: that takes instructions on bytes.
template <class Isa, class Weight>
constexpr bool narrow_weights = Isa::width >= 8 && sizeof(Weight) == 2;

template <class Isa, class Weight>
size_t product_bytes(const PackedMatrix& matrix, int rows) {
    if (matrix.quantized()) return QuantizedGemm<Isa, Weight>::bytes(matrix, rows);
    if constexpr (narrow_weights<Isa, Weight>) {
        if (matrix.format == Format::bf12) return Bf12Gemm<Isa>::bytes(matrix, rows);
    }
    return 0;
}

template <class Isa, class Weight>
void product(const Product& job) {
    if (job.matrix->quantized()) return QuantizedGemm<Isa, Weight>::product(job);
    if constexpr (narrow_weights<Isa, Weight>) {
        if (job.matrix->format == Format::bf12) return Bf12Gemm<Isa>::product(job);
    }
    Products<Isa, Weight>::product(job);
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
        narrow_weights<Isa, Weight>,
        rms_norm<Isa, In>,
        product_bytes<Isa, Weight>,
        product<Isa, Weight>,
        PagedAttention<Isa, Weight>::bytes,
        PagedAttention<Isa, Weight>::attend,
        PagedAttention<Isa, Weight>::merge,
        turn<Isa, In, Weight>,
        silu_and_mul<Isa>,
        widen_all<Isa, Weight>,
        narrow_all<Isa, Weight>,
        narrow_all<Isa, In>,
        widen_all<Isa, In>,
        read_all<Isa>,
        multiply<Isa, Weight>,
    };
}

}  // namespace
}  // namespace kvrelay
