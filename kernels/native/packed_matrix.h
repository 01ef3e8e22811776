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

enum class Format { bf16, f32, int8, int4 };

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

struct PackedMatrix {
    char* data = nullptr;
    int outputs = 0;
    int depth = 0;
    Format format = Format::bf16;

    int panels() const { return (outputs + kPanel - 1) / kPanel; }
    int groups() const { return depth / kGroup; }
    size_t panel_bytes() const { return row_bytes(format, depth) * kPanel; }
    const char* panel(int i) const { return data + i * panel_bytes(); }
    bool quantized() const { return format == Format::int8 || format == Format::int4; }

    // What one row takes.
    static size_t row_bytes(Format format, int depth);

    // Copy `rows` [outputs, depth]. Throws std::invalid_argument for a depth that is not whole pairs in bfloat16, or
    // whole groups in int8 and int4.
    static PackedMatrix from(const MatrixRows& rows, int outputs, int depth, Arena& arena);

    // One row in float32.
    void unpack_row(int output, float* to) const;
};

// What a group of one panel takes, in bytes.
constexpr int kInt8Group = kPanel * kGroup + kPanel * 2;
constexpr int kInt4Group = kPanel * kGroup / 2 + 2 * kPanel * 2;

}  // namespace kvrelay
