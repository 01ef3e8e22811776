#include "packed_matrix.h"

#include <stdexcept>

#include "half.h"

namespace kvrelay {

namespace {

constexpr size_t kUnit = 4;  // bytes that hold neighbouring values of one output
constexpr size_t kLine = kPanel * kUnit;

void pack_plain(const PackedMatrix& packed, const char* rows) {
    const size_t row_bytes = PackedMatrix::row_bytes(packed.format, packed.depth);
    for (int output = 0; output < packed.outputs; ++output) {
        const char* from = rows + output * row_bytes;
        char* to = packed.data + output / kPanel * packed.panel_bytes() + output % kPanel * kUnit;
        for (size_t unit = 0; unit < row_bytes / kUnit; ++unit) {
            std::memcpy(to + unit * kLine, from + unit * kUnit, kUnit);
        }
    }
}

// The codes of one group of one output, then its scale and, in int4, its minimum.
void pack_group(const MatrixRows& rows, size_t group, int output, char* to) {
    const int code_bytes = rows.format == Format::int8 ? kGroup : kGroup / 2;
    const char* codes = static_cast<const char*>(rows.values) + group * code_bytes;
    for (int i = 0; i < code_bytes; ++i) {
        // The products take signed activations by unsigned codes.
        const char code = rows.format == Format::int8 ? codes[i] ^ char(0x80) : codes[i];
        to[i / kUnit * kLine + output * kUnit + i % kUnit] = code;
    }
    char* scales = to + code_bytes * kPanel + output * 2;
    std::memcpy(scales, static_cast<const char*>(rows.scales) + group * 2, 2);
    if (rows.format == Format::int4) {
        std::memcpy(scales + kPanel * 2, static_cast<const char*>(rows.minimums) + group * 2, 2);
    }
}

void pack_groups(const PackedMatrix& packed, const MatrixRows& rows) {
    const size_t groups = packed.groups();
    const size_t group_bytes = packed.panel_bytes() / groups;
    for (int output = 0; output < packed.outputs; ++output) {
        char* to = packed.data + output / kPanel * packed.panel_bytes();
        for (size_t group = 0; group < groups; ++group) {
            pack_group(rows, output * groups + group, output % kPanel, to + group * group_bytes);
        }
    }
}

float read_half(const char* at) {
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return half_to_float(bits);
}

void unpack_int8(const char* at, int output, float* to) {
    const float scale = read_half(at + kGroup * kPanel + output * 2);
    for (int i = 0; i < kGroup; ++i) {
        const uint8_t code = at[i / kUnit * kLine + output * kUnit + i % kUnit];
        to[i] = (code - 128) * scale;
    }
}

void unpack_int4(const char* at, int output, float* to) {
    const char* scales = at + kGroup / 2 * kPanel + output * 2;
    const float scale = read_half(scales), minimum = read_half(scales + kPanel * 2);
    for (int i = 0; i < kGroup / 2; ++i) {
        const uint8_t codes = at[i / kUnit * kLine + output * kUnit + i % kUnit];
        to[i] = (codes & 15) * scale + minimum;
        to[i + kGroup / 2] = (codes >> 4) * scale + minimum;
    }
}

}  // namespace

size_t PackedMatrix::row_bytes(Format format, int depth) {
    switch (format) {
        case Format::bf16: return size_t(depth) * 2;
        case Format::f32: return size_t(depth) * 4;
        case Format::int8: return size_t(depth) / kGroup * (kInt8Group / kPanel);
        default: return size_t(depth) / kGroup * (kInt4Group / kPanel);
    }
}

MatrixRows MatrixRows::below(int row, int depth) const {
    const size_t groups = size_t(row) * (depth / kGroup);
    const size_t bytes = format == Format::int8   ? groups * kGroup
                         : format == Format::int4 ? groups * kGroup / 2
                                                  : PackedMatrix::row_bytes(format, depth) * row;
    const auto from = [](const void* data, size_t at) { return data ? static_cast<const char*>(data) + at : nullptr; };
    return {format, from(values, bytes), from(scales, groups * 2), from(minimums, groups * 2)};
}

PackedMatrix PackedMatrix::from(const MatrixRows& rows, int outputs, int depth, Arena& arena) {
    PackedMatrix packed{nullptr, outputs, depth, rows.format};
    if (outputs < 1 || depth < 1 || (packed.quantized() ? depth % kGroup : row_bytes(rows.format, depth) % kUnit)) {
        throw std::invalid_argument("a matrix needs whole pairs of columns in bfloat16, and 32 in int8 or int4");
    }
    packed.data = static_cast<char*>(arena.allocate(packed.panels() * packed.panel_bytes()));
    if (packed.quantized()) {
        pack_groups(packed, rows);
    } else {
        pack_plain(packed, static_cast<const char*>(rows.values));
    }
    return packed;
}

void PackedMatrix::unpack_row(int output, float* to) const {
    const char* at = panel(output / kPanel);
    output %= kPanel;
    if (format == Format::int8) {
        for (int i = 0; i < depth; i += kGroup, at += kInt8Group) unpack_int8(at, output, to + i);
        return;
    }
    if (format == Format::int4) {
        for (int i = 0; i < depth; i += kGroup, at += kInt4Group) unpack_int4(at, output, to + i);
        return;
    }
    at += output * kUnit;
    if (format == Format::f32) {
        for (int i = 0; i < depth; ++i, at += kLine) std::memcpy(to + i, at, 4);
        return;
    }
    for (int i = 0; i < depth; i += 2, at += kLine) {
        uint32_t pair;
        std::memcpy(&pair, at, 4);
        const uint32_t first = pair << 16, second = pair & 0xffff0000u;
        std::memcpy(to + i, &first, 4);
        std::memcpy(to + i + 1, &second, 4);
    }
}

}  // namespace kvrelay
