// Activations in 16 bits: each group of 32 values with a scale of its own.
#pragma once

#include "isa.h"
#include "packed_matrix.h"

namespace kvrelay {
namespace {

// A value is a code times `scale`, and the codes are split into words as `Isa::split` says. `total` is the sum of all
// values. The codes of an int8 weight are 128 too high, so sums over a group begin at `start`.
struct InputGroup {
    uint32_t first[kGroup / 4];
    uint32_t second[kGroup / 4];
    float scale;
    float total;
    int32_t start;
};

// Their high bytes, rounded, fit a signed byte.
constexpr float kHighestInput = 127 * 256;

template <class Isa, class In>
inline void to_group(const In* x, InputGroup& group) {
    using F = typename Isa::F;
    using U = typename Isa::U;
    using I = typename Isa::I;
    constexpr int parts = kGroup / Isa::width;
    F values[parts];
    U highest{};
    for (int i = 0; i < parts; ++i) {
        values[i] = load_float<Isa>(x + i * Isa::width);
        const U size = (U)values[i] & 0x7fffffffu;  // ordered as the values are, infinity and NaN last
        highest = size > highest ? size : highest;
    }
    uint32_t sizes[Isa::width], top_bits = 0;
    store(sizes, highest);
#pragma omp simd reduction(max : top_bits)
    for (int i = 0; i < Isa::width; ++i) top_bits = sizes[i] > top_bits ? sizes[i] : top_bits;
    float top;
    std::memcpy(&top, &top_bits, 4);

    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    const float inverse = top > 1e-30f ? kHighestInput / top : 0.0f;
    int32_t codes[kGroup], sum = 0;
    for (int i = 0; i < parts; ++i) {
        store(codes + i * Isa::width, (I)(values[i] * inverse + to_integer) - 0x4b400000);
    }
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < kGroup; ++i) sum += codes[i];
    Isa::split(codes, group.first, group.second);
    group.scale = top / kHighestInput;
    group.total = group.scale * sum;
    group.start = -128 * sum;
}

}  // namespace
}  // namespace kvrelay
