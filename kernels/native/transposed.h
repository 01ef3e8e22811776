// Rows to columns and back, a square of 32-bit units in registers at a time.
#pragma once

#include "isa.h"

namespace kvrelay {
namespace {

// `In` is what is computed with; a unit is `pack<In>` of its values.
template <class Isa, class In>
struct Transposed {
    using F = typename Isa::F;
    using U = typename Isa::U;
    using H = typename Isa::H;

    static constexpr int width = Isa::width;
    static constexpr int unit = 4;                      // bytes
    static constexpr int square_rows = width * pack<In>;  // that `columns` takes at a time

    // A panel of 16 rows as a product wants it, [depth / pack][16] units.
    static void panel(const In* const* rows, int depth, In* to) {
        const int units = depth / pack<In>;
        for (int row = 0; row < kPanel; row += width) {
            for (int first = 0; first < units; first += width) {
                const int count = units - first < width ? units - first : width;
                U square[width];
#pragma GCC unroll 16
                for (int i = 0; i < width; ++i) {
                    square[i] = load_some<U>(rows[row + i] + first * pack<In>, count * unit);
                }
                transpose(square);
                for (int i = 0; i < count; ++i) {
                    store(reinterpret_cast<char*>(to) + ((first + i) * kPanel + row) * unit, square[i]);
                }
            }
        }
    }

    // columns[dim][row], `stride` values apart. `count` is a multiple of `square_rows`.
    template <class From>
    static void columns(const From* const* rows, int count, int dims, In* to, int stride) {
        for (int row = 0; row < count; row += square_rows) {
            for (int dim = 0; dim < dims; dim += width) {
                const int some = dims - dim < width ? dims - dim : width;
                U square[width];
#pragma GCC unroll 16
                for (int i = 0; i < width; ++i) square[i] = side_by_side(rows + row + i * pack<In>, dim, some);
                transpose(square);
                for (int i = 0; i < some; ++i) store(to + (dim + i) * int64_t{stride} + row, square[i]);
            }
        }
    }

    // 16 rows, `depth` values each, of `from` [depth][16], times `scale`[16].
    template <class To>
    static void rows(const float* from, const float* scale, int depth, To* const* to) {
        for (int row = 0; row < kPanel; row += width) {
            const F factor = load<F>(scale + row);
            for (int first = 0; first < depth; first += width) {
                const int count = depth - first < width ? depth - first : width;
                U square[width] = {};
                for (int i = 0; i < count; ++i) square[i] = (U)(load<F>(from + (first + i) * kPanel + row) * factor);
                transpose(square);
                for (int i = 0; i < width; ++i) store_some(to[row + i] + first, (F)square[i], count);
            }
        }
    }

  private:
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

    template <class V>
    static V load_some(const void* from, size_t bytes) {
        if (bytes == sizeof(V)) return load<V>(from);
        V value = {};
        std::memcpy(&value, from, bytes);
        return value;
    }

    template <class To>
    static void store_some(To* to, F values, int count) {
        if (count == width) return store_float<Isa>(to, values);
        for (int i = 0; i < count; ++i) narrow(values[i], to[i]);
    }

    // The same `count` dimensions of `pack` rows.
    template <class From>
    static U side_by_side(const From* const* rows, int dim, int count) {
        if constexpr (sizeof(From) == 4) {
            return load_some<U>(rows[0] + dim, count * sizeof(From));
        } else {
            const U first = __builtin_convertvector(load_some<H>(rows[0] + dim, count * sizeof(From)), U);
            if constexpr (sizeof(In) == 4) return first << 16;
            const U second = __builtin_convertvector(load_some<H>(rows[1] + dim, count * sizeof(From)), U);
            return first | (second << 16);
        }
    }
};

}  // namespace
}  // namespace kvrelay
