// Scores and weighted values of a few rows of queries, straight from the pages: packing a block of keys would cost
// more than all its products.
#pragma once

#include "gemm.h"
#include "read_ahead.h"

namespace kvrelay {
namespace {

constexpr int kFewRows = 4;

template <class Isa, class Weight>
struct FewQueries {
    using F = typename Isa::F;
    using U = typename Isa::U;
    using In = Input<Isa, Weight>;

    static constexpr int width = Isa::width;
    static constexpr int lane_values = pack<Weight>;
    static constexpr int vector_values = width * lane_values;  // weights in one vector

    // A head must be whole vectors, since what follows it in memory may be anything.
    static bool fits(int rows, int head_dim) { return rows <= kFewRows && head_dim % vector_values == 0; }

    // scores[row][key] = q[row] . key, for `keys` keys, a multiple of `width`.
    static void score(
        const Weight* const* rows, int keys, const In* q, int row_count, int head_dim, float* scores, int stride,
        ReadAhead& ahead
    ) {
        // A key and a value of as many bytes for each key read, half of them here.
        const int lines = (width * head_dim * int(sizeof(Weight)) / 64 / row_count + 1) / 2;
        for (int key = 0; key < keys; key += width) {
            for (int row = 0; row < row_count; ++row) {
                F sum[width];
#pragma GCC unroll 16
                for (int i = 0; i < width; ++i) sum[i] = F{};  // `= {}` would put them in memory
                for (int dim = 0; dim < head_dim; dim += vector_values) {
                    multiply_keys(rows + key, dim, q + row * head_dim + dim, sum);
                }
                store(scores + row * stride + key, sums_of(sum));
                ahead.fetch(lines);
            }
        }
    }

    static inline __attribute__((always_inline)) void multiply_keys(
        const Weight* const* rows, int dim, const In* q, F (&sum)[width]
    ) {
        if constexpr (sizeof(In) == 2) {
            const U query = load<U>(q);
#pragma GCC unroll 16
            for (int i = 0; i < width; ++i) sum[i] = Isa::dot(sum[i], load<U>(rows[i] + dim), query);
        } else {
            for (int part = 0; part < vector_values; part += width) {
                const F query = load<F>(q + part);
#pragma GCC unroll 16
                for (int i = 0; i < width; ++i) sum[i] += load_float<Isa>(rows[i] + dim + part) * query;
            }
        }
    }

    // The sums of `width` vectors, in order. Two are interleaved and their halves added, until one is left.
    static inline __attribute__((always_inline)) F sums_of(F (&x)[width]) {
#pragma GCC unroll 4
        for (int half = width / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
            for (int i = 0; i < half; ++i) {
                U low, high;
                Isa::interleave((U)x[i], (U)x[i + half], low, high);
                x[i] = (F)low + (F)high;
            }
        }
        return x[0];
    }

    // out[row] = out[row] * shrink[row] + weights[row] . values
    static void add_values(
        const Weight* const* rows, int keys, const In* weights, int stride, int row_count, int head_dim,
        const float* shrink, float* out, int out_stride, ReadAhead& ahead
    ) {
        int dim = 0;
        for (; dim + 2 * vector_values <= head_dim; dim += 2 * vector_values) {
            add<2>(rows, keys, weights, stride, row_count, dim, shrink, out + dim, out_stride, ahead);
        }
        if (dim < head_dim) add<1>(rows, keys, weights, stride, row_count, dim, shrink, out + dim, out_stride, ahead);
    }

    template <int Loads>
    static void add(
        const Weight* const* rows, int keys, const In* weights, int stride, int row_count, int dim,
        const float* shrink, float* out, int out_stride, ReadAhead& ahead
    ) {
        switch (row_count) {
            case 1: return add_rows<Loads, 1>(rows, keys, weights, stride, dim, shrink, out, out_stride, ahead);
            case 2: return add_rows<Loads, 2>(rows, keys, weights, stride, dim, shrink, out, out_stride, ahead);
            case 3: return add_rows<Loads, 3>(rows, keys, weights, stride, dim, shrink, out, out_stride, ahead);
            default: return add_rows<Loads, 4>(rows, keys, weights, stride, dim, shrink, out, out_stride, ahead);
        }
    }

    // In bfloat16 even and odd dimensions are summed apart, which needs no shuffles.
    template <int Loads, int Rows>
    static void add_rows(
        const Weight* const* rows, int keys, const In* weights, int stride, int dim, const float* shrink, float* out,
        int out_stride, ReadAhead& ahead
    ) {
        constexpr int step = sizeof(In) == 2 ? 2 : 1;
        constexpr int lines = (Loads * int(sizeof(U)) * step / 64 + 1) / 2;
        F sum[Rows][Loads][lane_values] = {};
        for (int key = 0; key < keys; key += step) {
            ahead.fetch(lines);
#pragma GCC unroll 2
            for (int part = 0; part < Loads; ++part) {
                F value[lane_values];
                spread(rows + key, dim + part * vector_values, value);
#pragma GCC unroll 4
                for (int row = 0; row < Rows; ++row) {
                    const In* weight = weights + row * stride + key;
#pragma GCC unroll 2
                    for (int i = 0; i < lane_values; ++i) {
                        F& to = sum[row][part][i];
                        if constexpr (sizeof(In) == 2) {
                            to = Isa::dot(to, (U)value[i], all_bits<Isa>(load<uint32_t>(weight)));
                        } else {
                            to += value[i] * *weight;
                        }
                    }
                }
            }
        }
        for (int row = 0; row < Rows; ++row) {
            for (int part = 0; part < Loads; ++part) {
                F ordered[lane_values];
                if constexpr (lane_values == 2) {
                    U low, high;
                    Isa::interleave((U)sum[row][part][0], (U)sum[row][part][1], low, high);
                    ordered[0] = (F)low;
                    ordered[1] = (F)high;
                } else {
                    ordered[0] = sum[row][part][0];
                }
                for (int i = 0; i < lane_values; ++i) {
                    float* at = out + row * out_stride + part * vector_values + i * width;
                    store(at, load<F>(at) * shrink[row] + ordered[i]);
                }
            }
        }
    }

    // Even and odd dimensions: of two tokens side by side where they are multiplied in pairs, else as float32.
    static inline __attribute__((always_inline)) void spread(
        const Weight* const* rows, int dim, F (&value)[lane_values]
    ) {
        const U first = load<U>(rows[0] + dim);
        if constexpr (sizeof(Weight) == 4) {
            value[0] = (F)first;
        } else if constexpr (sizeof(In) == 2) {
            const U second = load<U>(rows[1] + dim);
            value[0] = (F)((first & 0xffffu) | (second << 16));
            value[1] = (F)((first >> 16) | (second & 0xffff0000u));
        } else {
            value[0] = (F)(first << 16);
            value[1] = (F)(first & 0xffff0000u);
        }
    }
};

}  // namespace
}  // namespace kvrelay
