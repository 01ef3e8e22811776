// The order in which a product of a few rows takes its panels: two at a time.
#pragma once

#include <type_traits>

#include "kernel_table.h"

namespace kvrelay {
namespace {

struct Panel {
    const PackedMatrix* matrix;
    int index;

    const char* data() const { return matrix->panel(index); }
};

// `each(count, panel, done)` computes one or two panels and calls `done(row, height, first, second)` with the sums
// [height][16] of each for some rows. `Dense` says what becomes of them.
template <class Dense, class Each>
void each_pair(const Product& job, Each each) {
    const std::integral_constant<int, 1> one;
    const std::integral_constant<int, 2> two;
    if (job.up) {
        for (int i = job.first; i < job.last; ++i) {
            const Panel panel[2] = {{job.matrix, i}, {job.up, i}};
            each(two, panel, [&](int row, int height, const float* gates, const float* ups) {
                for (int k = 0; k < height; ++k) {
                    Dense::gate(job, row + k, i, gates + k * kPanel, ups + k * kPanel);
                }
            });
        }
        return;
    }
    // Panels of distant sections side by side, so that memory sees several long streams.
    const int section = (job.last - job.first) / 2;
    for (int i = job.first; i < job.first + section; ++i) {
        const Panel panel[2] = {{job.matrix, i}, {job.matrix, i + section}};
        each(two, panel, [&](int row, int height, const float* first, const float* second) {
            for (int k = 0; k < height; ++k) {
                Dense::finish(job, row + k, i, first + k * kPanel);
                Dense::finish(job, row + k, i + section, second + k * kPanel);
            }
        });
    }
    for (int i = job.first + 2 * section; i < job.last; ++i) {
        const Panel panel[1] = {{job.matrix, i}};
        each(one, panel, [&](int row, int height, const float* sums, const float*) {
            for (int k = 0; k < height; ++k) Dense::finish(job, row + k, i, sums + k * kPanel);
        });
    }
}

}  // namespace
}  // namespace kvrelay
