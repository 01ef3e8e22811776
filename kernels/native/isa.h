// The instruction sets, each a struct of the few operations that differ. All else is vector arithmetic of the
// compiler, written once in templates over these structs.
//
// A unit `isa_*.cpp` compiles the templates with the flags of one instruction set. They are in an unnamed
// namespace and call nothing from the standard library that is not compiled into the unit: a shared inline
// function would be linked from any one unit, perhaps one whose instructions the machine lacks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "bf16.h"

namespace kvrelay {
namespace {

// A vector's size must not depend on a template's parameter, so each width is spelled out.
template <int Width>
struct Lanes;

template <>
struct Lanes<4> {
    typedef float F __attribute__((vector_size(16)));
    typedef uint32_t U __attribute__((vector_size(16)));
    typedef int32_t I __attribute__((vector_size(16)));
    typedef uint16_t H __attribute__((vector_size(8)));
};

template <>
struct Lanes<8> {
    typedef float F __attribute__((vector_size(32)));
    typedef uint32_t U __attribute__((vector_size(32)));
    typedef int32_t I __attribute__((vector_size(32)));
    typedef uint16_t H __attribute__((vector_size(16)));
};

template <>
struct Lanes<16> {
    typedef float F __attribute__((vector_size(64)));
    typedef uint32_t U __attribute__((vector_size(64)));
    typedef int32_t I __attribute__((vector_size(64)));
    typedef uint16_t H __attribute__((vector_size(32)));
};

template <int Width>
struct Vectors : Lanes<Width> {
    static constexpr int width = Width;
    using F = typename Lanes<Width>::F;
    using U = typename Lanes<Width>::U;
    using I = typename Lanes<Width>::I;
    using H = typename Lanes<Width>::H;

    // The pairs (a[i], b[i]) in order; `low` holds the first half of them, `high` the second.
    static void interleave(U a, U b, U& low, U& high) {
        low = high = U{};  // else a warning that is none
        for (int i = 0; i < Width / 2; ++i) {
            low[2 * i] = a[i];
            low[2 * i + 1] = b[i];
            high[2 * i] = a[Width / 2 + i];
            high[2 * i + 1] = b[Width / 2 + i];
        }
    }

    static F max(F a, F b) { return a > b ? a : b; }

    // Round to nearest, ties to even. NaN stays NaN.
    static H narrow(F x) {
        U bits;
        std::memcpy(&bits, &x, sizeof bits);
        const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const U quiet = (bits >> 16) | 0x40u;
        return __builtin_convertvector(x == x ? rounded : quiet, H);
    }

    // float16 to float32, for finite values.
    static F widen_half(H x) {
        const U bits = __builtin_convertvector(x, U);
        const F magnitude = (F)((bits & 0x7fffu) << 13) * 0x1p112f;
        return (F)((U)magnitude | (bits & 0x8000u) << 16);
    }

    // Products of four unsigned bytes per lane with four values of 16 bits. Those come in two words, as `split` makes
    // them of 32 values, each is multiplied into a sum of its own, and `total` is the sum of both.
    static void split(const int32_t* values, uint32_t* first, uint32_t* second) {
        for (int i = 0; i < 8; ++i, values += 4) {
            first[i] = (values[0] & 0xffff) | uint32_t(values[2]) << 16;
            second[i] = (values[1] & 0xffff) | uint32_t(values[3]) << 16;
        }
    }
    static void multiply(I& first, I& second, U bytes, U x_first, U x_second) {
        first += (I)(bytes & 0xffu) * ((I)(x_first << 16) >> 16) + (I)(bytes >> 16 & 0xffu) * ((I)x_first >> 16);
        second += (I)(bytes >> 8 & 0xffu) * ((I)(x_second << 16) >> 16) + (I)(bytes >> 24) * ((I)x_second >> 16);
    }
    static I total(I first, I second) { return first + second; }
};

// `dot_bf16`: activations are rounded to bfloat16 and multiplied two at a time; else they stay float32.
// `tile_rows` by `tile_panels` accumulators fit the registers, and so do `code_rows` by one or `tile_panels` pairs of
// accumulators of a quantized product.
//
// With vectors of bytes: `look_up` takes of each 16 bytes of a table those that bytes below 16 name; `interleave_bytes`
// has of each 16 bytes the first halves of a and b in `first`, byte by byte in turns, and the second ones in `second`.
struct Baseline : Vectors<4> {
    static constexpr bool dot_bf16 = false;
    static constexpr int tile_rows = 2, tile_panels = 1;
    static constexpr int code_rows = 1;
};

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
struct Avx2 : Vectors<8> {
    static constexpr bool dot_bf16 = false;
    static constexpr int tile_rows = 6, tile_panels = 1;
    static constexpr int code_rows = 2;

    static void interleave(U a, U b, U& low, U& high) {
        const __m256i even = _mm256_unpacklo_epi32((__m256i)a, (__m256i)b);
        const __m256i odd = _mm256_unpackhi_epi32((__m256i)a, (__m256i)b);
        low = (U)_mm256_permute2x128_si256(even, odd, 0x20);
        high = (U)_mm256_permute2x128_si256(even, odd, 0x31);
    }
    static void interleave_bytes(U a, U b, U& first, U& second) {
        first = (U)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b);
        second = (U)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b);
    }
    static U look_up(U table, U places) { return (U)_mm256_shuffle_epi8((__m256i)table, (__m256i)places); }
    static F max(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
    static F widen_half(H x) { return (F)_mm256_cvtph_ps((__m128i)x); }

    static void multiply(I& first, I& second, U bytes, U x_first, U x_second) {
        first += (I)_mm256_madd_epi16((__m256i)(bytes & 0x00ff00ffu), (__m256i)x_first);
        second += (I)_mm256_madd_epi16((__m256i)(bytes >> 8 & 0x00ff00ffu), (__m256i)x_second);
    }
};
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
struct Avx512 : Vectors<16> {
    static constexpr bool dot_bf16 = false;
    static constexpr int tile_rows = 12, tile_panels = 2;
    static constexpr int code_rows = 8;

    static void interleave(U a, U b, U& low, U& high) {
        const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        low = (U)_mm512_permutex2var_epi32((__m512i)a, first, (__m512i)b);
        high = (U)_mm512_permutex2var_epi32((__m512i)a, second, (__m512i)b);
    }
    static void interleave_bytes(U a, U b, U& first, U& second) {
        first = (U)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b);
        second = (U)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b);
    }
    static U look_up(U table, U places) { return (U)_mm512_shuffle_epi8((__m512i)table, (__m512i)places); }
    static F max(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
    static F widen_half(H x) { return (F)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x); }  // else a warning that is none

    static void multiply(I& first, I& second, U bytes, U x_first, U x_second) {
        first += (I)_mm512_madd_epi16((__m512i)(bytes & 0x00ff00ffu), (__m512i)x_first);
        second += (I)_mm512_madd_epi16((__m512i)(bytes >> 8 & 0x00ff00ffu), (__m512i)x_second);
    }
};
#endif

#if defined(__AVX512VNNI__)
struct Avx512Vnni : Avx512 {
    // The first word holds high bytes, the second low ones; both are signed.
    static void split(const int32_t* values, uint32_t* first, uint32_t* second) {
        int8_t high[32], low[32];
        for (int i = 0; i < 32; ++i) {
            high[i] = (values[i] + 128) >> 8;
            low[i] = values[i];
        }
        std::memcpy(first, high, 32);
        std::memcpy(second, low, 32);
    }
    static void multiply(I& first, I& second, U bytes, U x_first, U x_second) {
        first = (I)_mm512_dpbusd_epi32((__m512i)first, (__m512i)bytes, (__m512i)x_first);
        second = (I)_mm512_dpbusd_epi32((__m512i)second, (__m512i)bytes, (__m512i)x_second);
    }
    static I total(I first, I second) { return (first << 8) + second; }
};
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
struct Avx512Bf16 : Avx512Vnni {
    static constexpr bool dot_bf16 = true;
    static constexpr int tile_rows = 14, tile_panels = 2;

    static F dot(F sum, U a, U b) {
        return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
    }
    static H narrow(F x) { return (H)(__m256i)_mm512_cvtneps_pbh((__m512)x); }
};
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
struct Amx : Avx512Bf16 {};  // its products are in `tile_gemm.h`
#endif

// ---- loads and stores; pointers need no alignment

template <class V>
inline V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class V>
inline void store(void* to, V value) {
    std::memcpy(to, &value, sizeof value);
}

template <class Isa>
inline typename Isa::F all(float x) {
    return x - typename Isa::F{};
}

template <class Isa>
inline typename Isa::U all_bits(uint32_t x) {
    return x | typename Isa::U{};
}

inline float widen(bf16 x) {
    const uint32_t bits = uint32_t{x.bits} << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float widen(float x) { return x; }

inline void narrow(float x, float& to) { to = x; }

inline void narrow(float x, bf16& to) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to.bits = x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : (bits >> 16) | 0x40;
}

template <class Isa>
inline typename Isa::F load_float(const float* from) {
    return load<typename Isa::F>(from);
}

template <class Isa>
inline typename Isa::F load_float(const bf16* from) {
    const auto wide = __builtin_convertvector(load<typename Isa::H>(from), typename Isa::U) << 16;
    return (typename Isa::F)wide;
}

template <class Isa>
inline void store_float(float* to, typename Isa::F x) {
    store(to, x);
}

template <class Isa>
inline void store_float(bf16* to, typename Isa::F x) {
    store(to, Isa::narrow(x));
}

// Both rounded to bfloat16, side by side in each unit; halves up, and NaN is lost.
template <class Isa>
inline typename Isa::U round_pair(typename Isa::F first, typename Isa::F second) {
    using U = typename Isa::U;
    return (((U)first + 0x8000u) >> 16) | (((U)second + 0x8000u) & 0xffff0000u);
}

template <class Isa, class Mask>
inline bool any(Mask mask) {
    int found = 0;
    for (int i = 0; i < Isa::width; ++i) found |= mask[i];
    return found;
}

template <class Isa>
inline float sum(typename Isa::F x) {
    float total = 0;
    for (int i = 0; i < Isa::width; ++i) total += x[i];
    return total;
}

template <class Isa, class From, class To>
inline void convert_all(const From* from, To* to, int64_t count) {
    int64_t i = 0;
    for (; i + Isa::width <= count; i += Isa::width) store_float<Isa>(to + i, load_float<Isa>(from + i));
    for (; i < count; ++i) narrow(widen(from[i]), to[i]);
}

// ---- what activations are stored as, by instruction set and weights

template <class Isa, class Weight>
struct InputOf {
    using type = float;
};

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
template <>
struct InputOf<Avx512Bf16, bf16> {
    using type = bf16;
};
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
template <>
struct InputOf<Amx, bf16> {
    using type = bf16;
};
#endif

template <class Isa, class Weight>
using Input = typename InputOf<Isa, Weight>::type;

// How many consecutive values of one output lie side by side in a packed panel: they fill 32 bits.
template <class Weight>
constexpr int pack = 4 / sizeof(Weight);

// ---- e^x and what is made of it

// To about one unit in the last place; 0 below -87, where float32 ends.
// Cody and Waite's reduction by ln 2 in two parts, then a polynomial.
template <class Isa>
inline typename Isa::F exp(typename Isa::F x) {
    using F = typename Isa::F;
    using U = typename Isa::U;
    const auto vanishes = x < -87.0f;
    x = x > 88.0f ? all<Isa>(88.0f) : x;
    x = vanishes ? all<Isa>(0.0f) : x;
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    const F shifted = x * 1.44269504f + to_integer;
    const F n = shifted - to_integer;
    const F r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const F scale = (F)(((U)shifted << 23) + 0x3f800000u);
    return vanishes ? all<Isa>(0.0f) : p * scale;
}

// 2^x for weights of type `In`, which below 2^-126 need not be told from zero; x <= 126. A polynomial on [-1/2, 1/2].
template <class Isa, class In>
inline typename Isa::F exp2(typename Isa::F x) {
    using F = typename Isa::F;
    using U = typename Isa::U;
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    x = Isa::max(x, all<Isa>(-126.0f));
    const F shifted = x + to_integer;
    const F r = x - (shifted - to_integer);
    F p;
    if constexpr (sizeof(In) == 2) {
        p = r * 5.517164659e-2f + 2.426111413e-1f;
        p = p * r + 6.932609914e-1f;
        p = p * r + 9.999280725e-1f;
    } else {
        p = r * 1.534580977e-4f + 1.339993153e-3f;
        p = p * r + 9.618488968e-3f;
        p = p * r + 5.550328776e-2f;
        p = p * r + 2.402264689e-1f;
        p = p * r + 6.931472057e-1f;
        p = p * r + 1.0f;
    }
    return (F)((U)p + ((U)shifted << 23));
}

template <class Isa>
inline typename Isa::F silu(typename Isa::F x) {
    return x / (exp<Isa>(-x) + 1.0f);
}

template <class Isa>
inline typename Isa::F tanh(typename Isa::F x) {
    return 1.0f - 2.0f / (exp<Isa>(x + x) + 1.0f);
}

}  // namespace
}  // namespace kvrelay
