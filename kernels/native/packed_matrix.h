// A weight matrix in the order in which a product reads it.
//
// A panel is 16 outputs (rows of the matrix): `[depth / pack][16][pack]`, where `pack` values of one output fill
// 32 bits. It is one contiguous stream, and the same packing serves every instruction set, batch and number of
// threads. The last panel is filled up with zeros.
#pragma once

#include <cassert>
#include <cstddef>

#include "arena.h"
#include "bf16.h"

namespace kvrelay {

constexpr int kPanel = 16;

enum class Dtype { bf16, f32 };

inline size_t size_of(Dtype dtype) { return dtype == Dtype::bf16 ? 2 : 4; }

struct PackedMatrix {
    char* data = nullptr;
    int outputs = 0;
    int depth = 0;
    Dtype dtype = Dtype::bf16;

    int panels() const { return (outputs + kPanel - 1) / kPanel; }
    size_t panel_bytes() const { return size_t(depth) * kPanel * size_of(dtype); }
    const char* panel(int i) const { return data + i * panel_bytes(); }

    // Copy the row-major matrix `rows` [outputs, depth]. Throws std::invalid_argument for a depth that no
    // whole pairs make up.
    static PackedMatrix from(const void* rows, int outputs, int depth, Dtype dtype, Arena& arena);

    // One row, as it was.
    void unpack_row(int output, void* to) const;
};

}  // namespace kvrelay
