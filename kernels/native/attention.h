// Causal attention over pages, one pass with a running softmax (Dao et al., https://arxiv.org/abs/2205.14135), and what
// makes one result of several parts of a context.
#pragma once

#include "few_queries.h"
#include "many_queries.h"

namespace kvrelay {
namespace {

template <class Isa, class Weight>
struct PagedAttention {
    using Few = FewQueries<Isa, Weight>;
    using Many = ManyQueries<Isa, Weight>;
    using In = Input<Isa, Weight>;

    static size_t bytes(int lanes, int head_dim) {
        const size_t few = Few::bytes(lanes, head_dim), many = Many::bytes(lanes, head_dim);
        return few > many ? few : many;
    }

    static void attend(const Attention& job, void* memory) {
        if (Few::fits(Few::rows_of(job), job.kv->head_dim)) return Few::attend(job, memory);
        Many::attend(job, memory);
    }

    static void merge(const float* partial, int parts, int64_t stride, int heads, int head_dim, void* to) {
        In* out = static_cast<In*>(to);
        for (int head = 0; head < heads; ++head, out += head_dim, partial += head_dim + 2) {
            float highest = kLowest, total = 0;
            for (int part = 0; part < parts; ++part) {
                const float one = partial[part * stride];
                highest = one > highest ? one : highest;
            }
            for (int part = 0; part < parts; ++part) {
                const float* from = partial + part * stride;
                total += exp<Isa>(all<Isa>(from[0] - highest))[0] * from[1];
            }
            for (int i = 0; i < head_dim; ++i) narrow(0.0f, out[i]);
            for (int i = 0; i < head_dim; i += kPanel) {
                float sums[kPanel] = {};
                const int count = head_dim - i < kPanel ? head_dim - i : kPanel;
                for (int part = 0; part < parts; ++part) {
                    const float* from = partial + part * stride;
                    const float share = exp<Isa>(all<Isa>(from[0] - highest))[0] / total;
                    for (int k = 0; k < count; ++k) sums[k] += from[2 + i + k] * share;
                }
                for (int k = 0; k < count; ++k) narrow(sums[k], out[i + k]);
            }
        }
    }
};

}  // namespace
}  // namespace kvrelay
