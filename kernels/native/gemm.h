// Products of activations with packed panels.
//
// A tile holds up to `tile_rows` rows by `tile_panels` panels of results in registers and runs over the whole depth:
// panels are long streams, so nothing is blocked along it.
#pragma once

#include <utility>

#include "fetch.h"
#include "isa.h"
#include "kernel_table.h"

namespace kvrelay {
namespace {

template <class Isa, class Weight>
struct Gemm {
    using F = typename Isa::F;
    using U = typename Isa::U;
    using In = Input<Isa, Weight>;
    struct Registers {  // of `compute_into`, to be held while it is called
        explicit Registers(int) {}
    };

    static constexpr int parts = kPanel / Isa::width;
    static constexpr int rows = Isa::tile_rows;
    static constexpr int panels = Isa::tile_panels;
    static constexpr int64_t kCachedBytes = 256 << 10;  // rows of x that stay in the second-level cache

    using Tile = void (*)(const char* const* panel, const In* x, int64_t stride, int depth, float* out,
                          int64_t out_stride);

    // How far ahead of its use a weight is fetched, in bytes, and with how many rows. For a few the hardware's
    // prefetching is best left alone; with more of them the fetch must overlap the computation.
    static constexpr int kAhead = 4096;
    static bool fetches(int tile_rows) { return tile_rows > (kLargeFirstLevel ? 2 : 4); }

    // out[panel][row][16] = x[row] . panel, or with `Add` that is added; panels of `out` are `out_stride` apart.
    template <bool Add, int Panels, int Rows>
    static void tile(
        const char* const* panel, const In* x, int64_t stride, int depth, float* out, int64_t out_stride
    ) {
        const bool fetching = fetches(Rows), into_first_level = kLargeFirstLevel;
        F sum[Panels][parts][Rows];  // in registers, which a loop that is not unrolled would prevent
        each<Panels, Rows>([&](int p, int row, int i) { sum[p][i][row] = F{}; });
        const char* w[Panels];
        for (int p = 0; p < Panels; ++p) w[p] = panel[p];
        const int units = depth / pack<Weight>;
#pragma GCC unroll 2
        for (int unit = 0; unit < units; ++unit) {
            U weight[Panels][parts];
#pragma GCC unroll 16
            for (int p = 0; p < Panels; ++p) {
                const char* at = w[p] + int64_t{unit} * kPanel * 4;
                if (fetching) fetch(at + kAhead, into_first_level);
#pragma GCC unroll 16
                for (int i = 0; i < parts; ++i) weight[p][i] = load<U>(at + i * Isa::width * 4);
            }
#pragma GCC unroll 16
            for (int row = 0; row < Rows; ++row) {
                multiply<Panels, Rows>(sum, weight, x + row * stride + unit * pack<Weight>, row);
            }
        }
        each<Panels, Rows>([&](int p, int row, int i) {
            float* to = out + p * out_stride + row * kPanel + i * Isa::width;
            store(to, Add ? load<F>(to) + sum[p][i][row] : sum[p][i][row]);
        });
    }

    template <int Panels, int Rows, class Do>
    static inline __attribute__((always_inline)) void each(Do one) {
#pragma GCC unroll 16
        for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 16
            for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 16
                for (int i = 0; i < parts; ++i) one(p, row, i);
            }
        }
    }

    template <int Panels, int Rows>
    static inline __attribute__((always_inline)) void multiply(
        F (&sum)[Panels][parts][Rows], const U (&weight)[Panels][parts], const In* x, int row
    ) {
        if constexpr (sizeof(Weight) == 4) {
            const F value = all<Isa>(*x);
#pragma GCC unroll 16
            for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 16
                for (int i = 0; i < parts; ++i) sum[p][i][row] += (F)weight[p][i] * value;
            }
        } else if constexpr (sizeof(In) == 2) {
            const U pair = all_bits<Isa>(load<uint32_t>(x));
#pragma GCC unroll 16
            for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 16
                for (int i = 0; i < parts; ++i) sum[p][i][row] = Isa::dot(sum[p][i][row], weight[p][i], pair);
            }
        } else {
            const F first = all<Isa>(x[0]), second = all<Isa>(x[1]);
#pragma GCC unroll 16
            for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 16
                for (int i = 0; i < parts; ++i) {
                    sum[p][i][row] += (F)(weight[p][i] << 16) * first;
                    sum[p][i][row] += (F)(weight[p][i] & 0xffff0000u) * second;
                }
            }
        }
    }

    template <bool Add, int Panels, int... Rows>
    static Tile tile_of(int count, std::integer_sequence<int, Rows...>) {
        static constexpr Tile tiles[] = {tile<Add, Panels, Rows + 1>...};
        return tiles[count - 1];
    }

    template <bool Add = false>
    static Tile tile_of(int panel_count, int row_count) {
        constexpr auto counts = std::make_integer_sequence<int, rows>();
        if (panel_count == panels) return tile_of<Add, panels>(row_count, counts);
        return tile_of<Add, 1>(row_count, counts);
    }

    // out[panel][row][16] of all rows, stored as by a tile.
    template <bool Add>
    static void compute_into(
        const char* const* panel, int count, const In* x, int64_t stride, int row_count, int depth, float* out,
        int64_t out_stride
    ) {
        const int blocks = (row_count + rows - 1) / rows;
        for (int block = 0, row = 0; block < blocks; ++block) {
            const int height = (row_count - row + blocks - block - 1) / (blocks - block);
            tile_of<Add>(count, height)(panel, x + row * stride, stride, depth, out + row * kPanel, out_stride);
            row += height;
        }
    }

    // Compute `count` panels (one, or `panels`) for all `row_count` rows of x; call `done(panel, row, sums)` with
    // each 16 results, and `fetch(panel, row)` some time before.
    template <class Fetch, class Done>
    static void compute(
        const char* const* panel, int count, const In* x, int64_t stride, int row_count, int depth, Fetch fetch,
        Done done
    ) {
        alignas(64) float out[panels * rows * kPanel];
        // Blocks of nearly equal size: 16 rows are twice 8, not 14 and 2.
        const int blocks = (row_count + rows - 1) / rows;
        for (int block = 0, row = 0; block < blocks; ++block) {
            const int height = (row_count - row + blocks - block - 1) / (blocks - block);
            for (int p = 0; p < count; ++p) {
                for (int i = 0; i < height; ++i) fetch(p, row + i);
            }
            tile_of(count, height)(panel, x + row * stride, stride, depth, out, height * kPanel);
            for (int p = 0; p < count; ++p) {
                for (int i = 0; i < height; ++i) done(p, row + i, out + (p * height + i) * kPanel);
            }
            row += height;
        }
    }

    static void product(const Product& job) {
        product(job, [](const PackedMatrix& matrix, int panel, int) { return matrix.panel(panel); });
    }

    // `panel_of(matrix, i, place)` is panel i of a matrix as a tile reads it; one at each of two places is in use.
    template <class PanelOf>
    static void product(const Product& job, PanelOf panel_of) {
        const int depth = job.matrix->depth;
        const int64_t row_bytes = int64_t{depth} * sizeof(In);
        const int fit = kCachedBytes / row_bytes / rows * rows;
        const int step = fit < rows ? rows : fit;
        for (int row = 0; row < job.rows; row += step) {
            const int count = job.rows - row < step ? job.rows - row : step;
            const In* x = static_cast<const In*>(job.x) + row * int64_t{depth};
            if (job.up) {
                gated(job, x, row, count, panel_of);
            } else {
                plain(job, x, row, count, panel_of);
            }
        }
    }

    // The panels of a tile come from distant sections of the range, so that memory sees several long streams.
    template <class PanelOf>
    static void plain(const Product& job, const In* x, int first_row, int row_count, PanelOf panel_of) {
        const PackedMatrix& matrix = *job.matrix;
        const int section = (job.last - job.first) / panels;
        const auto run = [&](const char* const* panel, int count, int first) {
            compute(
                panel, count, x, matrix.depth, row_count, matrix.depth,
                [&](int p, int row) {
                    if (job.add) __builtin_prefetch(place(job, first_row + row, first + p * section), 1);
                },
                [&](int p, int row, float* sums) { finish(job, first_row + row, first + p * section, sums); });
        };
        for (int i = 0; i < section; ++i) {
            const char* panel[panels];
            for (int p = 0; p < panels; ++p) panel[p] = panel_of(matrix, job.first + p * section + i, p);
            run(panel, panels, job.first + i);
        }
        for (int i = job.first + panels * section; i < job.last; ++i) {
            const char* panel = panel_of(matrix, i, 0);
            run(&panel, 1, i);
        }
    }

    static float* place(const Product& job, int row, int panel) {
        return static_cast<float*>(job.out) + row * job.out_stride + panel * kPanel;
    }

    static void finish(const Product& job, int row, int panel, const float* sums) {
        const int at = panel * kPanel;
        const int left = job.matrix->outputs - at;
        float* out = place(job, row, panel);
        if (left < kPanel) {
            for (int i = 0; i < left; ++i) {
                out[i] = sums[i] + (job.bias ? job.bias[at + i] : 0.0f) + (job.add ? out[i] : 0.0f);
            }
            return;
        }
        for (int i = 0; i < kPanel; i += Isa::width) {
            F value = load<F>(sums + i);
            if (job.bias) value += load<F>(job.bias + at + i);
            if (job.add) value += load<F>(out + i);
            store(out + i, value);
        }
    }

    template <class PanelOf>
    static void gated(const Product& job, const In* x, int first_row, int row_count, PanelOf panel_of) {
        const int depth = job.matrix->depth;
        for (int i = job.first; i < job.last; ++i) {
            const char* panel[2] = {panel_of(*job.matrix, i, 0), panel_of(*job.up, i, 1)};
            if constexpr (panels == 2) {
                const int blocks = (row_count + rows - 1) / rows;
                for (int block = 0, row = 0; block < blocks; ++block) {
                    const int height = (row_count - row + blocks - block - 1) / (blocks - block);
                    alignas(64) float out[2 * rows * kPanel];
                    tile_of(2, height)(panel, x + row * int64_t{depth}, depth, depth, out, height * kPanel);
                    for (int k = 0; k < height; ++k) {
                        gate(job, first_row + row + k, i, out + k * kPanel, out + (height + k) * kPanel);
                    }
                    row += height;
                }
            } else {
                for (int row = 0; row < row_count; row += rows) {
                    const int height = row_count - row < rows ? row_count - row : rows;
                    alignas(64) float out[2][rows * kPanel];
                    for (int p = 0; p < 2; ++p) {
                        tile_of(1, height)(panel + p, x + row * int64_t{depth}, depth, depth, out[p], 0);
                    }
                    for (int k = 0; k < height; ++k) {
                        gate(job, first_row + row + k, i, out[0] + k * kPanel, out[1] + k * kPanel);
                    }
                }
            }
        }
    }

    static void gate(const Product& job, int row, int panel, const float* gates, const float* ups) {
        const int at = panel * kPanel;
        const int left = job.matrix->outputs - at;
        In* out = static_cast<In*>(job.out) + row * job.out_stride + at;
        alignas(64) In values[kPanel];
        for (int i = 0; i < kPanel; i += Isa::width) {
            store_float<Isa>(values + i, silu<Isa>(load<F>(gates + i)) * load<F>(ups + i));
        }
        std::memcpy(out, values, sizeof(In) * (left < kPanel ? left : kPanel));
    }
};

}  // namespace
}  // namespace kvrelay
