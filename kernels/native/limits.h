// The two limits of a machine that results are divided by: how fast memory is read, and how fast values multiply.
#pragma once

#include "isa.h"
#include "tiles.h"

namespace kvrelay {
namespace {

// Read all of `data` once, as `Streams` streams, and fetch `Ahead` bytes before their use.
template <class Isa, int Streams, int Ahead>
uint32_t read_streams(const char* data, size_t bytes) {
    using U = typename Isa::U;
    constexpr size_t step = 256;
    const size_t section = bytes / Streams / step * step;
    U sums[Streams] = {};
    for (size_t at = 0; at < section; at += step) {
        for (int stream = 0; stream < Streams; ++stream) {
            const char* from = data + stream * section + at;
            if (Ahead) {
                for (size_t line = 0; line < step; line += 64) __builtin_prefetch(from + Ahead + line, 0, 3);
            }
#pragma GCC unroll 32
            for (size_t i = 0; i < step; i += sizeof(U)) sums[stream] ^= load<U>(from + i);
        }
    }
    for (int stream = 1; stream < Streams; ++stream) sums[0] ^= sums[stream];
    return sums[0][0];
}

template <class Isa>
uint32_t read_all(const char* data, size_t bytes, int variant) {
    switch (variant) {
        case 0: return read_streams<Isa, 1, 0>(data, bytes);
        case 1: return read_streams<Isa, 1, 2048>(data, bytes);
        case 2: return read_streams<Isa, 2, 0>(data, bytes);
        case 3: return read_streams<Isa, 2, 2048>(data, bytes);
        case 4: return read_streams<Isa, 4, 0>(data, bytes);
        default: return read_streams<Isa, 4, 2048>(data, bytes);
    }
}

// Multiply and add in registers; returns the operations done.
template <class Isa, class Weight>
int64_t multiply(int rounds) {
    using F = typename Isa::F;
    using U = typename Isa::U;
    constexpr int sums = Isa::width == 16 ? 24 : 12;  // enough to hide the latency, and in registers
    F sum[sums];
    for (int i = 0; i < sums; ++i) sum[i] = all<Isa>(i);  // equal ones would be computed once
    F x = all<Isa>(1.0f);
    for (int round = 0; round < rounds; ++round) {
        asm volatile("" : "+x"(x));  // else the products are known at compile time
#pragma GCC unroll 24
        for (int i = 0; i < sums; ++i) {
            if constexpr (sizeof(Input<Isa, Weight>) == 2) {
                sum[i] = Isa::dot(sum[i], (U)x, (U)x);
            } else {
                sum[i] += x * x;
            }
        }
    }
    for (int i = 1; i < sums; ++i) sum[0] += sum[i];
    asm volatile("" : : "m"(sum[0]));
    const int values = Isa::width * 4 / int{sizeof(Input<Isa, Weight>)};
    return int64_t{rounds} * sums * values * 2;
}

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
template <>
int64_t multiply<Amx, bf16>(int rounds) {
    const Tiles tiles(Tiles::kRows);
    for (int round = 0; round < rounds; ++round) {
        Tiles::multiply<0, 0>();
        Tiles::multiply<0, 1>();
        Tiles::multiply<1, 0>();
        Tiles::multiply<1, 1>();
    }
    return int64_t{rounds} * 4 * 16 * 16 * 32 * 2;
}
#endif

}  // namespace
}  // namespace kvrelay
