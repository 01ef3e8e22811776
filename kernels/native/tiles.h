// AMX's tiles: 8 registers of 16 rows of 64 bytes, as a thread uses them for a while.
#pragma once

#include <type_traits>

#include "isa.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)

namespace kvrelay {
namespace {

// Configures them for sums and inputs of at most `height` rows, which take `depth_bytes` of an input's row. A thread that is done keeps none of
// their 8 KiB, which the kernel would else save whenever it is switched.
//
// Registers 0 to 3 are sums [tile of rows][panel], 4 and 5 inputs, 6 and 7 weights. The compiler's own functions do
// not say which memory they read.
class Tiles {
  public:
    static constexpr int kRows = 16, kRowBytes = 64;

    explicit Tiles(int height, int depth_bytes = kRowBytes) {
        alignas(64) uint8_t config[64] = {1};
        for (int tile = 0; tile < 8; ++tile) {
            const bool input = tile == inputs(0) || tile == inputs(1), weight = tile >= weights(0);
            config[16 + 2 * tile] = input ? depth_bytes : kRowBytes;
            config[48 + tile] = weight ? depth_bytes / 4 : height < kRows ? height : kRows;
        }
        asm volatile("ldtilecfg %0" : : "m"(config));
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;

    static constexpr int sums(int rows, int panel) { return 2 * rows + panel; }
    static constexpr int inputs(int rows) { return 4 + rows; }
    static constexpr int weights(int panel) { return 6 + panel; }

    template <int tile>
    static inline __attribute__((always_inline)) void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(tile));
    }
    template <int tile>
    static inline __attribute__((always_inline)) void load(const void* from, int64_t stride_bytes) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride_bytes), "i"(tile) : "memory");
    }
    // What is not read again soon: it leaves the first level of the cache to what is.
    template <int tile>
    static inline __attribute__((always_inline)) void load_past(const void* from, int64_t stride_bytes) {
        asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride_bytes), "i"(tile) : "memory");
    }
    template <int tile>
    static inline __attribute__((always_inline)) void store(void* to, int64_t stride_bytes) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride_bytes), "i"(tile) : "memory");
    }
    template <int rows, int panel>
    static inline __attribute__((always_inline)) void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
                     : : "i"(sums(rows, panel)), "i"(inputs(rows)), "i"(weights(panel)));
    }
#if defined(__AMX_INT8__)
    // Signed inputs, unsigned weights.
    template <int rows, int panel>
    static inline __attribute__((always_inline)) void multiply_bytes() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0"
                     : : "i"(sums(rows, panel)), "i"(inputs(rows)), "i"(weights(panel)));
    }
#endif
};

// `one(rows, panel)` with numbers that the compiler knows.
template <int TilesOfRows, int Panels, class Do>
inline __attribute__((always_inline)) void each_tile(Do one) {
    const std::integral_constant<int, 0> first;
    const std::integral_constant<int, 1> second;
    one(first, first);
    if constexpr (Panels == 2) one(first, second);
    if constexpr (TilesOfRows == 2) one(second, first);
    if constexpr (TilesOfRows == 2 && Panels == 2) one(second, second);
}

}  // namespace
}  // namespace kvrelay

#endif
