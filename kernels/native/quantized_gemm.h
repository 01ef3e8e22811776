// Products with matrices in int8 and int4.
//
// A few rows are bound by memory: their activations become integers too, and groups are multiplied as such. Many rows
// are bound by multiplications: panels are unpacked into the cache, in the type that the fast products take.
#pragma once

#include "codes.h"
#include "input_groups.h"
#include "panel_pairs.h"
#include "products.h"
#include "tile_groups.h"

namespace kvrelay {
namespace {

template <class Isa, class Weight>
struct QuantizedGemm {
    using Dense = Products<Isa, Weight>;
    using F = typename Isa::F;
    using U = typename Isa::U;
    using I = typename Isa::I;
    using H = typename Isa::H;
    using In = Input<Isa, Weight>;

    static constexpr int parts = kPanel / Isa::width;
    static constexpr int rows = Isa::code_rows;
    static constexpr int panels = Isa::tile_panels;
    static constexpr int few_rows = 32;

    using Tile = void (*)(const char* const* panel, const InputGroup* x, int groups, float* out);

    static size_t bytes(const PackedMatrix& matrix, int row_count) {
        if (row_count <= few_rows) {
            if constexpr (TileGroups<Isa>::least_rows <= few_rows) {
                if (row_count >= TileGroups<Isa>::least_rows) {
                    return TileGroups<Isa>::bytes(row_count, matrix.groups());
                }
            }
            return size_t(row_count) * matrix.groups() * sizeof(InputGroup);
        }
        return 2 * dense_panel_bytes(matrix.depth);
    }

    static void product(const Product& job) {
        if (job.matrix->format == Format::int8) {
            of_format<Format::int8>(job);
        } else {
            of_format<Format::int4>(job);
        }
    }

  private:
    template <Format format>
    static void of_format(const Product& job) {
        if (job.rows <= few_rows) {
            few<format>(job);
        } else {
            many<format>(job);
        }
    }

    // ---- a few rows

    template <Format format>
    static void few(const Product& job) {
        using Tiles = TileGroups<Isa>;
        const int groups = job.matrix->groups();
        const In* from = static_cast<const In*>(job.x);
        if constexpr (Tiles::least_rows <= few_rows) {
            if (job.rows >= Tiles::least_rows) {
                const auto* x = Tiles::inputs(from, job.rows, groups, job.memory);
                const typename Tiles::Registers registers;
                return each_pair<Dense>(job, [&](auto count, const Panel* of, auto done) {
                    const char* panel[2] = {of[0].data(), of[count - 1].data()};
                    Tiles::template each_block<format, count>(panel, x, job.rows, groups, done);
                });
            }
        }
        InputGroup* x = static_cast<InputGroup*>(job.memory);
        for (int64_t i = 0; i < int64_t{job.rows} * groups; ++i) to_group<Isa>(from + i * kGroup, x[i]);
        each_pair<Dense>(job, [&](auto count, const Panel* of, auto done) {
            const char* panel[2] = {of[0].data(), of[count - 1].data()};
            each_block<format, count>(panel, x, job.rows, groups, done);
        });
    }

    // For blocks of rows of nearly equal size.
    template <Format format, int count, class Done>
    static void each_block(const char* const* panel, const InputGroup* x, int row_count, int groups, Done done) {
        alignas(64) float sums[count * rows * kPanel];
        const int blocks = (row_count + rows - 1) / rows;
        for (int block = 0, row = 0; block < blocks; ++block) {
            const int height = (row_count - row + blocks - block - 1) / (blocks - block);
            const InputGroup* from = x + int64_t{row} * groups;
            if (count == panels && height <= rows / 2) {
                tile_of<format, count>(height)(panel, from, groups, sums);
            } else {
                for (int p = 0; p < count; ++p) {
                    tile_of<format, 1>(height)(panel + p, from, groups, sums + p * height * kPanel);
                }
            }
            done(row, height, sums, sums + (count - 1) * height * kPanel);
            row += height;
        }
    }

    template <Format format, int Panels, int... Rows>
    static Tile tile_of(int count, std::integer_sequence<int, Rows...>) {
        static constexpr Tile tiles[] = {tile<format, Panels, Rows + 1>...};
        return tiles[count - 1];
    }

    template <Format format, int Panels>
    static Tile tile_of(int row_count) {
        constexpr int most = Panels == 1 ? rows : (rows + 1) / 2;
        return tile_of<format, Panels>(row_count, std::make_integer_sequence<int, most>());
    }

    template <Format format, int Panels, int Rows>
    static void tile(const char* const* panel, const InputGroup* x, int groups, float* out) {
        using Unit = Codes<Isa, format>;
        constexpr int distance = Rows <= 4 ? 0 : 4096;  // as in Gemm: many rows must fetch ahead
        F sum[Panels][parts][Rows];  // in registers, which a loop that is not unrolled would prevent
        Dense::template each<Panels, Rows>([&](int p, int row, int i) { sum[p][i][row] = F{}; });
        const char* w[Panels];
        for (int p = 0; p < Panels; ++p) w[p] = panel[p];
        for (int group = 0; group < groups; ++group, ++x) {
            I first[Panels][parts][Rows], second[Panels][parts][Rows];
            Dense::template each<Panels, Rows>([&](int p, int row, int i) {
                first[p][i][row] = I{};
                second[p][i][row] = format == Format::int8 ? I{} + x[row * groups].start : I{};
            });
#pragma GCC unroll 16
            for (int unit = 0; unit < Unit::count; ++unit) {
#pragma GCC unroll 16
                for (int p = 0; p < Panels; ++p) {
                    const char* at = w[p] + unit * kPanel * 4;
                    if (distance) __builtin_prefetch(at + distance, 0, 2);
#pragma GCC unroll 16
                    for (int i = 0; i < parts; ++i) {
                        const U codes = load<U>(at + i * Isa::width * 4);
                        multiply(first[p][i], second[p][i], Unit::low(codes), x, groups, unit);
                        if (format == Format::int8) continue;
                        multiply(first[p][i], second[p][i], Unit::high(codes), x, groups, unit + Unit::count);
                    }
                }
            }
            Dense::template each<Panels, Rows>([&](int p, int row, int i) {
                const char* scales = w[p] + Unit::count * kPanel * 4 + i * Isa::width * 2;
                const F scale = Isa::widen_half(load<H>(scales)) * x[row * groups].scale;
                const I dot = Isa::total(first[p][i][row], second[p][i][row]);
                sum[p][i][row] += __builtin_convertvector(dot, F) * scale;
                if (format == Format::int8) return;
                sum[p][i][row] += Isa::widen_half(load<H>(scales + kPanel * 2)) * x[row * groups].total;
            });
            for (int p = 0; p < Panels; ++p) w[p] += group_bytes<format>;
        }
        Dense::template each<Panels, Rows>([&](int p, int row, int i) {
            store(out + (p * Rows + row) * kPanel + i * Isa::width, sum[p][i][row]);
        });
    }

    // Four codes of each output times four values of each row.
    template <int Rows>
    static inline __attribute__((always_inline)) void multiply(
        I (&first)[Rows], I (&second)[Rows], U bytes, const InputGroup* x, int groups, int unit
    ) {
#pragma GCC unroll 16
        for (int row = 0; row < Rows; ++row) {
            const InputGroup& group = x[row * groups];
            Isa::multiply(
                first[row], second[row], bytes, all_bits<Isa>(group.first[unit]), all_bits<Isa>(group.second[unit])
            );
        }
    }

    // ---- many rows

    static size_t dense_panel_bytes(int depth) { return size_t(depth) * kPanel * sizeof(Weight); }

    template <Format format>
    static void many(const Product& job) {
        Dense::product(job, [&](const PackedMatrix& matrix, int panel, int place) {
            char* to = static_cast<char*>(job.memory) + place * dense_panel_bytes(matrix.depth);
            unpack<format>(matrix.panel(panel), matrix.groups(), to);
            return to;
        });
    }

    template <Format format>
    static void unpack(const char* from, int groups, char* to) {
        using Unit = Codes<Isa, format>;
        for (int group = 0; group < groups; ++group) {
            const char* scales = from + Unit::count * kPanel * 4;
            for (int i = 0; i < parts; ++i) {
                const F scale = Isa::widen_half(load<H>(scales + i * Isa::width * 2));
                const F minimum = format == Format::int8
                                      ? scale * -128.0f
                                      : Isa::widen_half(load<H>(scales + (kPanel + i * Isa::width) * 2));
#pragma GCC unroll 8
                for (int unit = 0; unit < Unit::count; ++unit) {
                    const U codes = load<U>(from + (unit * kPanel + i * Isa::width) * 4);
                    if (format == Format::int8) {
                        unpack_unit<8, 0>(codes, scale, minimum, to, unit, i);
                    } else {
                        unpack_unit<4, 0>(codes, scale, minimum, to, unit, i);
                        unpack_unit<4, 4>(codes, scale, minimum, to, unit + Unit::count, i);
                    }
                }
            }
            from += group_bytes<format>;
            to += kGroup * kPanel * sizeof(Weight);
        }
    }

    // Four values per output to their places in a group of a panel. Their codes are `Bits` bits from `From` on of each
    // byte.
    template <int Bits, int From>
    static inline __attribute__((always_inline)) void unpack_unit(
        U codes, F scale, F minimum, char* to, int unit, int part
    ) {
        // Most stay where they are: the scale is that much smaller. The highest would become a sign.
        const auto value = [&](int k) {
            const int at = 8 * k + From;
            const bool stays = at + Bits < 32;
            const U code = stays ? codes & ((1u << Bits) - 1) << at : codes >> at;
            const F shifted = scale * (1.0f / (1u << at));
            return __builtin_convertvector((I)code, F) * (stays ? shifted : scale) + minimum;
        };
        to += unit * 4 * kPanel * sizeof(Weight) + part * Isa::width * 4;
#pragma GCC unroll 4
        for (int k = 0; k < 4; k += pack<Weight>, to += kPanel * 4) {
            if constexpr (sizeof(Weight) == 4) {
                store(to, value(k));
            } else {
                store(to, pair(value(k), value(k + 1)));
            }
        }
    }

    // Both in bfloat16, the first in the lower half. Halves go up, which is as near as to even.
    static U pair(F first, F second) {
        const U low = (U)first + 0x8000u, high = (U)second + 0x8000u;
        return low >> 16 | (high & 0xffff0000u);
    }
};

}  // namespace
}  // namespace kvrelay
