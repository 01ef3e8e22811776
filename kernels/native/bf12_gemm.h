// Products with matrices in bf12: the same, to the bit, as with the bfloat16 that they hold.
//
// A few rows are bound by memory, and expand panels while they multiply. Of more rows the first do so, and leave what
// they expanded in the cache to the others.
#pragma once

#include "bf12_panel.h"
#include "panel_pairs.h"
#include "products.h"

namespace kvrelay {
namespace {

// The products of one or two panels with some rows. `each_block` calls `done(row, height, first, second)` with the sums
// [height][16] of each panel for some of them; more than `most` rows need memory for whole panels in bfloat16.
template <class Isa>
struct Bf12Rows {
    using Dense = Gemm<Isa, bf16>;
    using In = Input<Isa, bf16>;
    using F = typename Isa::F;
    using U = typename Isa::U;
    using Source = Bf12Panel<Isa>;
    using Registers = typename Dense::Registers;

    static constexpr int parts = kPanel / Isa::width;
    static constexpr int most = Dense::rows;

    template <int Panels, class Done>
    static void each_block(const Panel* panel, const In* x, int row_count, char* const* memory, Done done) {
        constexpr int together = Panels <= Dense::panels ? Panels : 1;
        const int depth = panel[0].matrix->depth;
        const int blocks = (row_count + most - 1) / most;
        alignas(64) float sums[Panels * most * kPanel];
        for (int block = 0, row = 0; block < blocks; ++block) {
            const int height = (row_count - row + blocks - block - 1) / (blocks - block);
            const In* from = x + row * int64_t{depth};
            for (int p = 0; p < Panels; p += together) {
                float* to = sums + p * height * kPanel;
                if (block == 0) {
                    tile_of<together>(height)(panel + p, from, blocks > 1 ? memory + p : nullptr, to);
                } else {
                    Dense::tile_of(together, height)(memory + p, from, depth, depth, to, height * kPanel);
                }
            }
            done(row, height, sums, sums + (Panels - 1) * height * kPanel);
            row += height;
        }
    }

  private:
    using Tile = void (*)(const Panel* panel, const In* x, char* const* memory, float* out);

    template <int Panels, int... Rows>
    static Tile tile_of(int count, std::integer_sequence<int, Rows...>) {
        static constexpr Tile tiles[] = {tile<Panels, Rows + 1>...};
        return tiles[count - 1];
    }

    template <int Panels>
    static Tile tile_of(int row_count) {
        return tile_of<Panels>(row_count, std::make_integer_sequence<int, most>());
    }

    // out[panel][row][16]
    template <int Panels, int Rows>
    static void tile(const Panel* panel, const In* x, char* const* memory, float* out) {
        constexpr bool fits_registers = Panels * parts * Rows <= 16;  // beside four lines of each panel
        Source from[Panels];
        for (int p = 0; p < Panels; ++p) from[p] = Source(*panel[p].matrix, panel[p].index);
        F sum[Panels][parts][Rows];  // in registers, which a loop that is not unrolled would prevent
        Dense::template each<Panels, Rows>([&](int p, int row, int i) { sum[p][i][row] = F{}; });
        const int depth = panel[0].matrix->depth;
        alignas(64) char group[Panels][Source::kGroupBytes];
        for (int at = 0; at < depth; at += kGroup) {
            char* to[Panels];
            for (int p = 0; p < Panels; ++p) {
                to[p] = memory ? memory[p] + at / kGroup * Source::kGroupBytes : group[p];
            }
            each_line(from, fits_registers && !memory, to, [&](int line, const U (&weight)[Panels][parts]) {
#pragma GCC unroll 16
                for (int row = 0; row < Rows; ++row) {
                    Dense::template multiply<Panels, Rows>(sum, weight, x + row * int64_t{depth} + at + line * 2, row);
                }
            });
        }
        Dense::template each<Panels, Rows>([&](int p, int row, int i) {
            store(out + (p * Rows + row) * kPanel + i * Isa::width, sum[p][i][row]);
        });
    }
};

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)

// By AMX's tiles. One row is faster in vectors, which add up in the order of tiles.
template <>
struct Bf12Rows<Amx> {
    using Dense = TileGemm<Amx>;
    using In = bf16;
    using F = Amx::F;
    using U = Amx::U;
    using Source = Bf12Panel<Amx>;
    using Registers = Tiles;

    static constexpr int most = 2 * Tiles::kRows;

    template <int Panels, class Done>
    static void each_block(const Panel* panel, const In* x, int row_count, char* const* memory, Done done) {
        constexpr int kSums = Dense::kSums;
        alignas(64) float sums[Panels * kSums];
        Source from[Panels];
        for (int p = 0; p < Panels; ++p) from[p] = Source(*panel[p].matrix, panel[p].index);
        const int depth = panel[0].matrix->depth;
        const auto give = [&](int row, int height, const float* first) {
            done(row, height, first, first + (Panels - 1) * kSums);
        };
        if (row_count == 1) {
            one_row(from, x, depth, sums);
            return give(0, 1, sums);
        }
        if (row_count <= Tiles::kRows) {
            block<1>(from, x, 0, depth, nullptr, sums);
            return give(0, row_count, sums);
        }
        // The second tile overlaps the first where rows do not fill it; what is left then fills a tile.
        const int height = row_count <= most ? row_count : row_count < most + Tiles::kRows ? Tiles::kRows : most;
        const int second = height - Tiles::kRows;
        if (second == 0) {
            block<1>(from, x, 0, depth, memory, sums);
        } else {
            block<2>(from, x, second, depth, row_count > most ? memory : nullptr, sums);
        }
        give(0, Tiles::kRows, sums);
        if (second > 0) give(Tiles::kRows, second, sums + (2 * Tiles::kRows - second) * kPanel);
        if (height == row_count) return;

        const char* next[Panels];
        for (int p = 0; p < Panels; ++p) next[p] = panel[p].matrix->panel(panel[p].index + 1);
        const int64_t steps = int64_t{Dense::blocks_of(row_count - height)} * (depth / kGroup);
        const typename Dense::Ahead ahead(next, Panels, panel[0].matrix->panel_bytes(), steps, false);
        Dense::each_row<Panels>(
            memory, x + height * int64_t{depth}, row_count - height, depth, ahead,
            [&](int row, const float* one) { give(height + row, 1, one); });
    }

  private:
    // sums[panel][tile of rows][16][16] of the rows from 0 and from `second` on.
    template <int TilesOfRows, int Panels>
    static void block(
        Source (&from)[Panels], const In* x, int second, int depth, char* const* memory, float* sums
    ) {
        alignas(64) char groups[Panels][2][Source::kGroupBytes];
        const auto place = [&](int p, int group) {
            return memory ? memory[p] + group * Source::kGroupBytes : groups[p][group & 1];
        };
        const int64_t stride = int64_t{depth} * sizeof(In);
        const char* const first = reinterpret_cast<const char*>(x);
        const char* const inputs[2] = {first, first + second * stride};
        each_tile<TilesOfRows, Panels>([&](auto rows, auto p) { Tiles::zero<Tiles::sums(rows, p)>(); });
        // A group ahead, so that no tile is loaded from what has just been stored.
        for (int p = 0; p < Panels; ++p) from[p].next_group(place(p, 0));
        for (int group = 0, last = depth / kGroup; group < last; ++group) {
            if (group + 1 < last) {
                for (int p = 0; p < Panels; ++p) from[p].next_group(place(p, group + 1));
            }
            each_tile<1, Panels>([&](auto, auto p) {
                Tiles::load<Tiles::weights(p)>(place(p, group), Tiles::kRowBytes);
            });
            each_tile<TilesOfRows, 1>([&](auto rows, auto) {
                Tiles::load<Tiles::inputs(rows)>(inputs[rows] + group * Tiles::kRowBytes, stride);
            });
            each_tile<TilesOfRows, Panels>([&](auto rows, auto p) { Tiles::multiply<rows, p>(); });
        }
        each_tile<TilesOfRows, Panels>([&](auto rows, auto p) {
            float* to = sums + p * Dense::kSums + rows * Tiles::kRows * kPanel;
            Tiles::store<Tiles::sums(rows, p)>(to, Tiles::kRowBytes);
        });
    }

    // The first row's sums [panel][kSums]. Of each group a tile sums the first values of pairs and the second ones apart.
    template <int Panels>
    static void one_row(Source (&from)[Panels], const In* x, int depth, float* sums) {
        alignas(64) char group[Panels][Source::kGroupBytes];
        char* to[Panels];
        for (int p = 0; p < Panels; ++p) to[p] = group[p];
        F sum[Panels] = {};
        for (int at = 0; at < depth; at += kGroup) {
            F first[Panels] = {}, second[Panels] = {};
            each_line(from, true, to, [&](int line, const U (&weight)[Panels][1]) {
                const U pair = all_bits<Amx>(load<uint32_t>(x + at + line * 2));
#pragma GCC unroll 2
                for (int p = 0; p < Panels; ++p) {
                    first[p] = Amx::dot(first[p], weight[p][0], pair & 0x0000ffffu);
                    second[p] = Amx::dot(second[p], weight[p][0], pair & 0xffff0000u);
                }
            });
            for (int p = 0; p < Panels; ++p) sum[p] += first[p] + second[p];
        }
        for (int p = 0; p < Panels; ++p) store(sums + p * Dense::kSums, sum[p]);
    }
};

#endif

template <class Isa>
struct Bf12Gemm {
    using Dense = Products<Isa, bf16>;
    using Rows = Bf12Rows<Isa>;
    using In = Input<Isa, bf16>;

    static size_t bytes(const PackedMatrix& matrix, int row_count) {
        return row_count <= Rows::most ? 0 : 2 * panel_bytes(matrix.depth);
    }

    // In steps of nearly equal size, whose rows of x stay in the second-level cache.
    static void product(const Product& job) {
        const int64_t depth = job.matrix->depth;
        const int64_t fit = Dense::kCachedBytes / (depth * int64_t{sizeof(In)});
        const int64_t step = fit < Rows::most ? Rows::most : fit;
        const int64_t steps = (job.rows + step - 1) / step;
        const typename Rows::Registers registers(job.rows);
        for (int64_t i = 0; i < steps; ++i) {
            const int64_t row = job.rows * i / steps;
            Product part = job;
            part.rows = static_cast<int>(job.rows * (i + 1) / steps - row);
            part.x = static_cast<const In*>(job.x) + row * depth;
            part.out = static_cast<char*>(job.out) + row * job.out_stride * (job.up ? sizeof(In) : sizeof(float));
            some_rows(part);
        }
    }

  private:
    static void some_rows(const Product& job) {
        char* const memory = static_cast<char*>(job.memory);
        char* const whole[2] = {memory, memory + panel_bytes(job.matrix->depth)};
        each_pair<Dense>(job, [&](auto count, const Panel* panel, auto done) {
            Rows::template each_block<count>(panel, static_cast<const In*>(job.x), job.rows, whole, done);
        });
    }

    static size_t panel_bytes(int depth) { return size_t(depth) * kPanel * sizeof(bf16); }
};

}  // namespace
}  // namespace kvrelay
