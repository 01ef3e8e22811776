// Products of bfloat16 by AMX: one instruction multiplies 16 rows of 32 values with a panel's next 32.
//
// A tile is 16 rows of 64 bytes. Of a packed panel those are 16 pairs of values of 16 outputs, a KiB that lies together.
// Sums stay in tiles over the whole depth, of up to two tiles of rows by two panels.
#pragma once

#include "gemm.h"
#include "tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)

namespace kvrelay {
namespace {

template <class Isa>
struct TileGemm : Gemm<Isa, bf16> {
    using Base = Gemm<Isa, bf16>;
    using In = bf16;

    using Registers = Tiles;

    static constexpr int panels = 2;
    static constexpr int kRows = Tiles::kRows, kRowBytes = Tiles::kRowBytes;
    static constexpr int kDepth = 32;                  // of a tile
    static constexpr int64_t kCachedBytes = 1 << 20;  // rows of x that stay in the second-level cache

    // ---- products with a matrix

    static void product(const Product& job) {
        product(job, [](const PackedMatrix& matrix, int panel, int) { return matrix.panel(panel); });
    }

    // As in Gemm.
    template <class PanelOf>
    static void product(const Product& job, PanelOf panel_of) {
        const int64_t depth = job.matrix->depth;
        const int64_t fit = kCachedBytes / (depth * int64_t{sizeof(In)}) / kRows * kRows;
        const int64_t step = fit < 2 * kRows ? 2 * kRows : fit;
        const int64_t steps = (job.rows + step - 1) / step;
        const Tiles tiles(job.rows);
        for (int64_t i = 0; i < steps; ++i) {  // of nearly equal size, so that none has fewer rows than a tile
            const int row = static_cast<int>(job.rows * i / steps);
            const int count = static_cast<int>(job.rows * (i + 1) / steps) - row;
            const In* x = static_cast<const In*>(job.x) + row * depth;
            if (job.up) {
                gated(job, x, row, count, panel_of);
            } else {
                plain(job, x, row, count, panel_of);
            }
        }
    }

    template <class PanelOf>
    static void plain(const Product& job, const In* x, int first_row, int row_count, PanelOf panel_of) {
        const PackedMatrix& matrix = *job.matrix;
        const int section = (job.last - job.first) / panels;
        const auto ahead_of = [&](const char* const* panel, int count) {
            return Ahead(panel, count, matrix.depth, blocks_of(row_count));
        };
        for (int i = job.first; i < job.first + section; ++i) {
            const char* panel[panels] = {panel_of(matrix, i, 0), panel_of(matrix, i + section, 1)};
            each_row<panels>(panel, x, row_count, matrix.depth, ahead_of(panel, panels), [&](int row, const float* sums) {
                Base::finish(job, first_row + row, i, sums);
                Base::finish(job, first_row + row, i + section, sums + kSums);
            });
        }
        for (int i = job.first + panels * section; i < job.last; ++i) {
            const char* panel = panel_of(matrix, i, 0);
            each_row<1>(&panel, x, row_count, matrix.depth, ahead_of(&panel, 1), [&](int row, const float* sums) {
                Base::finish(job, first_row + row, i, sums);
            });
        }
    }

    template <class PanelOf>
    static void gated(const Product& job, const In* x, int first_row, int row_count, PanelOf panel_of) {
        for (int i = job.first; i < job.last; ++i) {
            const char* panel[2] = {panel_of(*job.matrix, i, 0), panel_of(*job.up, i, 1)};
            const int depth = job.matrix->depth;
            const Ahead ahead(panel, 2, depth, blocks_of(row_count));
            each_row<2>(panel, x, row_count, depth, ahead, [&](int row, const float* sums) {
                Base::gate(job, first_row + row, i, sums, sums + kSums);
            });
        }
    }

    // ---- products of an attention

    // As in Gemm, by a caller whose `Registers` take whole tiles.
    template <bool Add>
    static void compute_into(
        const char* const* panel, int count, const In* x, int64_t stride, int row_count, int depth, float* out,
        int64_t out_stride
    ) {
        if (row_count % kRows && (Add || row_count < kRows)) {
            return Base::template compute_into<Add>(panel, count, x, stride, row_count, depth, out, out_stride);
        }
        for (int row = 0; row < row_count; row += 2 * kRows) {
            const bool two = row_count - row > kRows;
            const int first = row_count - row < kRows ? row_count - kRows : row;
            const int second = row_count - row < 2 * kRows ? row_count - kRows : row + kRows;
            const In* at[2] = {x + first * stride, x + second * stride};
            float* to[2] = {out + first * kPanel, out + second * kPanel};
            block_of<Add>(two, count)(panel, at, stride, kRows, depth, to, out_stride, nullptr);
        }
    }

    // ---- blocks of rows

    static constexpr int kSums = 2 * kRows * kPanel;  // of one panel, in a block

    // What is fetched while panels are multiplied.
    struct Ahead {
        static constexpr int kBytes = 512;

        const char* at[panels];
        const char* end[panels];
        int lines;  // in a step of `kDepth`
        bool into_first_level;

        // One block of rows waits for memory: its own weights, some steps ahead. Among several, evenly, the panels
        // after these.
        Ahead(const char* const* panel, int count, int depth, int blocks)
            : lines((kRows + blocks - 1) / blocks), into_first_level(blocks == 1) {
            const int64_t panel_bytes = int64_t{depth} * kPanel * sizeof(In);
            for (int p = 0; p < count; ++p) {
                at[p] = panel[p] + (blocks == 1 ? kBytes : panel_bytes);
                end[p] = panel[p] + 2 * panel_bytes;
            }
        }

        // `bytes` from each of `next` on, evenly.
        Ahead(const char* const* next, int count, int64_t bytes, int64_t steps, bool into_first_level)
            : lines(static_cast<int>((bytes / 64 + steps - 1) / steps)), into_first_level(into_first_level) {
            for (int p = 0; p < count; ++p) {
                at[p] = next[p];
                end[p] = next[p] + bytes;
            }
        }

        template <int Panels>
        inline __attribute__((always_inline)) void fetch_some() {
            for (int p = 0; p < Panels; ++p) {
                if (at[p] >= end[p]) continue;
                for (int i = 0; i < lines; ++i) fetch(at[p] + i * 64, into_first_level);
                at[p] += lines * 64;
            }
        }
    };

    static int blocks_of(int row_count) { return (row_count + 2 * kRows - 1) / (2 * kRows); }

    // Multiply `Panels` panels with all rows; call `done(row, sums)` for each, panels are `kSums` apart. The last tiles
    // overlap the ones before where rows do not fill them.
    template <int Panels, class Done>
    static void each_row(const char* const* panel, const In* x, int row_count, int depth, Ahead ahead, Done done) {
        alignas(64) float out[Panels * kSums];
        float* to[2] = {out, out + kRows * kPanel};
        const int height = row_count < kRows ? row_count : kRows;
        for (int row = 0; row < row_count; row += 2 * kRows) {
            const bool two = row_count - row > kRows;
            const int first = row_count - row < kRows ? row_count - height : row;
            const int second = row_count - row < 2 * kRows ? row_count - height : row + kRows;
            const In* at[2] = {x + first * int64_t{depth}, x + second * int64_t{depth}};
            block_of<false>(two, Panels)(panel, at, depth, height, depth, to, kSums, &ahead);
            for (int i = row - first; i < height; ++i) done(first + i, out + i * kPanel);
            if (!two) continue;
            for (int i = row + kRows - second; i < height; ++i) done(second + i, to[1] + i * kPanel);
        }
    }

  private:
    using Block = void (*)(const char* const* panel, const In* const* x, int64_t stride, int height, int depth,
                           float* const* out, int64_t out_stride, Ahead* ahead);

    template <bool Add>
    static Block block_of(bool two, int count) {
        if (two) return count == 2 ? block<Add, 2, 2> : block<Add, 2, 1>;
        return count == 2 ? block<Add, 1, 2> : block<Add, 1, 1>;
    }

    // out[rows][panel] of one or two tiles of rows of `height`, or that is added.
    template <bool Add, int TilesOfRows, int Panels>
    static void block(
        const char* const* panel, const In* const* x, int64_t stride, int height, int depth, float* const* out,
        int64_t out_stride, Ahead* ahead
    ) {
        constexpr int kTileBytes = kRows * kRowBytes;
        each_tile<TilesOfRows, Panels>([&](auto rows, auto p) {
            constexpr int tile = Tiles::sums(rows, p);
            if constexpr (Add) {
                Tiles::load<tile>(out[rows] + p * out_stride, kRowBytes);
            } else {
                Tiles::zero<tile>();
            }
        });
        const auto step = [&](const char* const* inputs, int64_t input_stride, const char* const* weights) {
            each_tile<1, Panels>([&](auto, auto p) { Tiles::load<Tiles::weights(p)>(weights[p], kRowBytes); });
            each_tile<TilesOfRows, 1>([&](auto rows, auto) {
                Tiles::load_past<Tiles::inputs(rows)>(inputs[rows], input_stride);
            });
            each_tile<TilesOfRows, Panels>([&](auto rows, auto p) { Tiles::multiply<rows, p>(); });
        };
        const char* inputs[TilesOfRows];
        const char* weights[Panels];
        for (int i = 0; i < TilesOfRows; ++i) inputs[i] = reinterpret_cast<const char*>(x[i]);
        for (int p = 0; p < Panels; ++p) weights[p] = panel[p];
        int done = 0;
        for (; done + kDepth <= depth; done += kDepth) {
            if (ahead) ahead->template fetch_some<Panels>();
            step(inputs, stride * sizeof(In), weights);
            for (int i = 0; i < TilesOfRows; ++i) inputs[i] += kRowBytes;
            for (int p = 0; p < Panels; ++p) weights[p] += kTileBytes;
        }
        if (done < depth) {
            alignas(64) char last_inputs[TilesOfRows][kTileBytes], last_weights[Panels][kTileBytes];
            const char *some_inputs[TilesOfRows], *some_weights[Panels];
            for (int i = 0; i < TilesOfRows; ++i) {
                some_inputs[i] = last_inputs[i];
                for (int row = 0; row < height; ++row) {
                    fill(inputs[i] + row * stride * int64_t{sizeof(In)}, (depth - done) * sizeof(In), kRowBytes,
                         last_inputs[i] + row * kRowBytes);
                }
            }
            for (int p = 0; p < Panels; ++p) {
                some_weights[p] = last_weights[p];
                fill(weights[p], (depth - done) * kPanel * sizeof(In), kTileBytes, last_weights[p]);
            }
            step(some_inputs, kRowBytes, some_weights);
        }
        each_tile<TilesOfRows, Panels>([&](auto rows, auto p) {
            Tiles::store<Tiles::sums(rows, p)>(out[rows] + p * out_stride, kRowBytes);
        });
    }

    // `count` bytes and zeros.
    static void fill(const char* from, size_t count, size_t size, char* to) {
        std::memcpy(to, from, count);
        std::memset(to + count, 0, size - count);
    }
};

}  // namespace
}  // namespace kvrelay

#endif
