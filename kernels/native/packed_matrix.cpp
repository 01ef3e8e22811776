#include "packed_matrix.h"

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace kvrelay {

namespace {

constexpr size_t kUnit = 4;  // bytes that hold `pack` values of one output

}  // namespace

PackedMatrix PackedMatrix::from(const void* rows, int outputs, int depth, Dtype dtype, Arena& arena) {
    const size_t row_bytes = size_t(depth) * size_of(dtype);
    if (outputs < 1 || depth < 1 || row_bytes % kUnit) {
        throw std::invalid_argument("a matrix in bfloat16 needs an even number of columns");
    }
    PackedMatrix packed{nullptr, outputs, depth, dtype};
    packed.data = static_cast<char*>(arena.allocate(packed.panels() * packed.panel_bytes()));
    for (int output = 0; output < outputs; ++output) {
        const char* from = static_cast<const char*>(rows) + output * row_bytes;
        char* to = packed.data + output / kPanel * packed.panel_bytes() + output % kPanel * kUnit;
        for (size_t unit = 0; unit < row_bytes / kUnit; ++unit) {
            std::memcpy(to + unit * kPanel * kUnit, from + unit * kUnit, kUnit);
        }
    }
    return packed;
}

void PackedMatrix::unpack_row(int output, void* to) const {
    const char* from = panel(output / kPanel) + output % kPanel * kUnit;
    for (size_t unit = 0; unit < size_t(depth) * size_of(dtype) / kUnit; ++unit) {
        std::memcpy(static_cast<char*>(to) + unit * kUnit, from + unit * kPanel * kUnit, kUnit);
    }
}

}  // namespace kvrelay
