// A block of keys or values of one head in the form of a packed matrix, whose outputs are the tokens or the dimensions.
#pragma once

#include "gemm.h"

namespace kvrelay {
namespace {

template <class Isa, class Weight>
struct KVPanels {
    using U = typename Isa::U;

    static constexpr int width = Isa::width;
    static constexpr int unit = 4;  // bytes: `pack` values

    // Panels of 16 tokens, [head_dim / pack][16] units. `keys` is a multiple of 16.
    static void pack_keys(const Weight* const* rows, int keys, int head_dim, char* panels) {
        const int units = head_dim / pack<Weight>;
        for (int key = 0; key < keys; key += width) {
            char* panel = panels + (size_t(key / kPanel) * units * kPanel + key % kPanel) * unit;
            for (int first = 0; first < units; first += width) {
                const int count = units - first < width ? units - first : width;
                U square[width];
#pragma GCC unroll 16
                for (int i = 0; i < width; ++i) square[i] = load_units(rows[key + i] + first * pack<Weight>, count);
                transpose(square);
                for (int i = 0; i < count; ++i) store(panel + (first + i) * kPanel * unit, square[i]);
            }
        }
    }

    static U load_units(const Weight* from, int count) {
        if (count == width) return load<U>(from);
        U value = {};
        std::memcpy(&value, from, count * unit);
        return value;
    }

    // log2(width) rounds, each of which interleaves the first half of the rows with the second.
    static inline __attribute__((always_inline)) void transpose(U (&square)[width]) {
#pragma GCC unroll 4
        for (int round = 1; round < width; round *= 2) {
            U mixed[width];
#pragma GCC unroll 16
            for (int i = 0; i < width / 2; ++i) {
                Isa::interleave(square[i], square[i + width / 2], mixed[2 * i], mixed[2 * i + 1]);
            }
#pragma GCC unroll 16
            for (int i = 0; i < width; ++i) square[i] = mixed[i];
        }
    }

    // Panels of 16 dimensions, [keys / pack][16] units, `panel_bytes` apart.
    static void pack_values(const Weight* const* rows, int keys, int head_dim, char* panels, size_t panel_bytes) {
        constexpr int step = pack<Weight>;
        const int whole = head_dim / kPanel * kPanel;
        for (int key = 0; key < keys; key += step) {
            char* to = panels + size_t(key / step) * kPanel * unit;
            for (int dim = 0; dim < whole; dim += kPanel, to += panel_bytes) {
                for (int i = 0; i < kPanel; i += width) store(to + i * unit, side_by_side(rows + key, dim + i));
            }
            for (int dim = whole; dim < head_dim; ++dim) {
                Weight values[step];
                for (int i = 0; i < step; ++i) values[i] = rows[key + i][dim];
                std::memcpy(to + (dim - whole) * unit, values, unit);
            }
        }
    }

    // The same dimensions of `pack` tokens.
    static U side_by_side(const Weight* const* rows, int dim) {
        if constexpr (sizeof(Weight) == 4) {
            return load<U>(rows[0] + dim);
        } else {
            const U first = __builtin_convertvector(load<typename Isa::H>(rows[0] + dim), U);
            const U second = __builtin_convertvector(load<typename Isa::H>(rows[1] + dim), U);
            return first | (second << 16);
        }
    }
};

}  // namespace
}  // namespace kvrelay
