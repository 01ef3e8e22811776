// Products of a few rows with matrices in int8 and int4 by AMX's integer tiles.
//
// The same integers as without tiles, so a row's result is the same to the bit: of each group one tile of products with
// the high bytes of activations and one with the low ones.
#pragma once

#include "codes.h"
#include "input_groups.h"
#include "tiles.h"

namespace kvrelay {
namespace {

template <class Isa>
struct TileGroups {
    static constexpr int least_rows = 1 << 30;  // none: there are no tiles
};

#if defined(__AMX_TILE__) && defined(__AMX_INT8__)

template <>
struct TileGroups<Amx> {
    using F = Amx::F;
    using U = Amx::U;
    using I = Amx::I;
    using H = Amx::H;

    static constexpr int least_rows = 3;  // fewer are faster without
    static constexpr int kRows = 8;       // of a tile: high bytes of a row, then its low ones
    static constexpr int kAhead = 2048;   // bytes by which codes are fetched before their use
    static constexpr int kPending = 3;    // tiles on their way to memory

    // To be held while panels are computed.
    struct Registers : Tiles {
        Registers() : Tiles(Tiles::kRows, kGroup) {}
    };

    // A group of eight rows. Of rows that are not there nothing is set, and nothing read that is made of them.
    struct alignas(64) Input {
        uint32_t bytes[kRows][kGroup / 2];
        float scale[kRows];
        float total[kRows];
        int32_t start[kRows];
    };

    static int blocks_of(int rows) { return (rows + kRows - 1) / kRows; }

    static size_t bytes(int rows, int groups) { return 64 + size_t(blocks_of(rows)) * groups * sizeof(Input); }

    // [blocks][groups], in memory of `bytes`.
    template <class In>
    static const Input* inputs(const In* x, int rows, int groups, void* memory) {
        Input* const to = reinterpret_cast<Input*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
        InputGroup one;
        for (int row = 0; row < rows; ++row) {
            for (int group = 0; group < groups; ++group, x += kGroup) {
                to_group<Amx>(x, one);
                Input& input = to[row / kRows * groups + group];
                std::memcpy(input.bytes[row % kRows], one.first, kGroup);
                std::memcpy(input.bytes[row % kRows] + kGroup / 4, one.second, kGroup);
                input.scale[row % kRows] = one.scale;
                input.total[row % kRows] = one.total;
                input.start[row % kRows] = one.start;
            }
        }
        return to;
    }

    // Call `done(row, height, first, second)` with the sums [height][16] of each panel, for some rows at a time.
    template <Format format, int Panels, class Done>
    static void each_block(const char* const* panel, const Input* x, int rows, int groups, Done done) {
        for (int row = 0; row < rows; row += 2 * kRows, x += 2 * groups) {
            alignas(64) float sums[2][2 * kRows * kPanel];
            const int height = rows - row < 2 * kRows ? rows - row : 2 * kRows;
            if (height > kRows) {
                blocks<format, Panels, 2>(panel, x, height, groups, sums);
            } else {
                blocks<format, Panels, 1>(panel, x, height, groups, sums);
            }
            done(row, height, sums[0], sums[1]);
        }
    }

  private:
    using Dots = int32_t[2 * kRows * kPanel];

    // A tile of products on its way to memory, and what becomes of it.
    struct Pending {
        alignas(64) Dots dots;
        const char* codes;
        const Input* x;
        int height;
        float* sums;
    };

    // One or two blocks of rows. Some tiles are on their way while an earlier one is scaled.
    template <Format format, int Panels, int Blocks>
    static void blocks(
        const char* const* panel, const Input* x, int height, int groups, float (*sums)[2 * kRows * kPanel]
    ) {
        Pending ring[kPending];
        for (int p = 0; p < Panels; ++p) {
            for (int i = 0; i < height * kPanel; i += Amx::width) store(sums[p] + i, F{});
        }
        int begun = 0;
        const auto begin = [&](auto block, auto p, int group) {
            if (begun >= kPending) add<format>(ring[begun % kPending]);
            Pending& next = ring[begun++ % kPending];
            next.codes = panel[p] + int64_t{group} * group_bytes<format>;
            next.x = x + block * groups + group;
            next.height = block == 1 ? height - kRows : height < kRows ? height : kRows;
            next.sums = sums[p] + block * kRows * kPanel;
            constexpr int tile = Tiles::sums(block, p);
            Tiles::zero<tile>();
            Tiles::multiply_bytes<block, p>();
            Tiles::store<tile>(next.dots, Tiles::kRowBytes);
        };
        const std::integral_constant<int, 0> first;
        const std::integral_constant<int, 1> second;
        for (int group = 0; group < groups; ++group) {
            load_codes<format, 0>(panel[0] + int64_t{group} * group_bytes<format>);
            if constexpr (Panels == 2) load_codes<format, 1>(panel[1] + int64_t{group} * group_bytes<format>);
            Tiles::load<Tiles::inputs(0)>(x[group].bytes, kGroup);
            if constexpr (Blocks == 2) Tiles::load<Tiles::inputs(1)>(x[groups + group].bytes, kGroup);
            begin(first, first, group);
            if constexpr (Panels == 2) begin(first, second, group);
            if constexpr (Blocks == 2) begin(second, first, group);
            if constexpr (Blocks == 2 && Panels == 2) begin(second, second, group);
        }
        for (int i = begun < kPending ? 0 : begun - kPending; i < begun; ++i) add<format>(ring[i % kPending]);
    }

    template <Format format, int p>
    static inline __attribute__((always_inline)) void load_codes(const char* from) {
        for (int line = 0; line < group_bytes<format>; line += 64) __builtin_prefetch(from + kAhead + line, 0, 3);
        if constexpr (format == Format::int8) {
            Tiles::load<Tiles::weights(p)>(from, Tiles::kRowBytes);
        } else {
            constexpr int half = kGroup * kPanel / 2;
            alignas(64) char codes[2 * half];
#pragma GCC unroll 4
            for (int i = 0; i < half; i += Tiles::kRowBytes) {
                const U both = load<U>(from + i);
                store(codes + i, Codes<Amx, format>::low(both));
                store(codes + half + i, Codes<Amx, format>::high(both));
            }
            Tiles::load<Tiles::weights(p)>(codes, Tiles::kRowBytes);
        }
    }

    template <Format format>
    static inline __attribute__((always_inline)) void add(const Pending& done) {
        const char* scales = done.codes + group_bytes<format> - (format == Format::int8 ? 1 : 2) * kPanel * 2;
        const F scale = Amx::widen_half(load<H>(scales));
        const F minimum = format == Format::int8 ? F{} : Amx::widen_half(load<H>(scales + kPanel * 2));
        const Input& x = *done.x;
        float* sums = done.sums;
        const auto one = [&](int row) {
            const int32_t* at = done.dots + 2 * row * kPanel;
            I dot = Amx::total(load<I>(at), load<I>(at + kPanel));
            if (format == Format::int8) dot += x.start[row];
            float* to = sums + row * kPanel;
            F sum = load<F>(to) + __builtin_convertvector(dot, F) * (scale * x.scale[row]);
            if (format == Format::int4) sum += minimum * x.total[row];
            store(to, sum);
        };
        if (done.height == kRows) {
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row) one(row);
        } else {
            for (int row = 0; row < done.height; ++row) one(row);
        }
    }
};

#endif

}  // namespace
}  // namespace kvrelay
