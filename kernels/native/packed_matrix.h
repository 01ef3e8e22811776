// A weight matrix in the order in which a product reads it.
//
// A panel is 16 outputs (rows of the matrix), one contiguous stream, and the same packing serves every instruction
// set, batch and number of threads. The last panel is filled up with zeros.
//
// In bfloat16 and float32 a panel is `[depth / pack][16][pack]`, where `pack` values of one output fill 32 bits.
// In int8 and int4 it is one piece after the other for each group of 32 values along the depth. A value is
// `code * scale + minimum`, or `(code - 128) * scale` in int8.
//   int8: codes `[8][16][4]` bytes, then 16 scales in float16
//   int4: codes `[4][16][4]` bytes, then 16 scales and 16 minimums. Byte k of unit j holds value 4 j + k in its low
//         four bits and value 16 + 4 j + k in its high ones
//
// bf12 is bfloat16 in 12 bits, without loss. The exponents of a matrix lie close together: four bits say which of 15
// it is, or that the value is zero. The few values with another exponent are exceptions: zero in the panel, and listed
// beside it. A panel is one piece after the other for each 8 values along the depth, 128 values in all: `[2][64]` bytes
// of sign and mantissa, then `[64]` bytes of codes, those of the first 64 values in the low four bits. Of 64 values,
// two lines of 16 pairs, every 16 bytes hold a quarter of the first line and then one of the second, as it takes one
// instruction to bring bytes and exponents together.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>

#include "arena.h"
#include "bf16.h"

namespace kvrelay {

constexpr int kPanel = 16;
constexpr int kGroup = 32;  // values along the depth that share a scale

enum class Dtype { bf16, f32 };

inline size_t size_of(Dtype dtype) { return dtype == Dtype::bf16 ? 2 : 4; }

enum class Format { bf16, bf12, f32, int8, int4 };

inline Format format_of(Dtype dtype) { return dtype == Dtype::bf16 ? Format::bf16 : Format::f32; }

// A row-major matrix [outputs, depth] to be packed. Signed bytes in int8. In int4 group g of a row is 16 bytes, whose
// byte i holds value i in its low four bits and value 16 + i in its high ones. Scales and minimums are float16
// [outputs, depth / 32].
struct MatrixRows {
    Format format;
    const void* values;
    const void* scales;
    const void* minimums;

    MatrixRows below(int row, int depth) const;  // from `row` on
};

// In bf12: the value that is in its panel's place `at`, as bfloat16 packs it.
struct Exception {
    uint32_t at;
    bf16 value;
};

struct PackedMatrix {
    char* data = nullptr;
    int outputs = 0;
    int depth = 0;
    Format format = Format::bf16;

    // In bf12: `high[c]` is the high byte, without its sign, of values with code c; the last bit of their exponent is
    // that of the code. The 16 are there four times. Exceptions of panel i are [first_exception[i],
    // first_exception[i + 1]), in order.
    const uint8_t* high = nullptr;
    const uint32_t* first_exception = nullptr;
    const Exception* exceptions = nullptr;

    int panels() const { return (outputs + kPanel - 1) / kPanel; }
    int groups() const { return depth / kGroup; }
    size_t panel_bytes() const { return row_bytes(format, depth) * kPanel; }
    const char* panel(int i) const { return data + i * panel_bytes(); }
    bool quantized() const { return format == Format::int8 || format == Format::int4; }

    // What one row takes.
    static size_t row_bytes(Format format, int depth);

    // Copy `rows` [outputs, depth]. With `narrow`, bfloat16 becomes bf12 where its exponents and depth allow it. Throws
    // std::invalid_argument for a depth that is not whole pairs in bfloat16, or whole groups in int8 and int4.
    static PackedMatrix from(const MatrixRows& rows, int outputs, int depth, bool narrow, Arena& arena);

    // One row in float32.
    void unpack_row(int output, float* to) const;
};

// What a group of one panel takes, in bytes.
constexpr int kInt8Group = kPanel * kGroup + kPanel * 2;
constexpr int kInt4Group = kPanel * kGroup / 2 + 2 * kPanel * 2;
constexpr int kBf12Group = kPanel * kGroup * 3 / 2;

}  // namespace kvrelay
