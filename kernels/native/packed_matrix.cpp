#include "packed_matrix.h"

#include <optional>
#include <stdexcept>

#include "half.h"

namespace kvrelay {

namespace {

constexpr size_t kUnit = 4;  // bytes that hold neighbouring values of one output
constexpr size_t kLine = kPanel * kUnit;

float widened(bf16 value) {
    const uint32_t bits = uint32_t{value.bits} << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

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

// ---- bf12

constexpr int kExponents = 256, kCodes = 16;
constexpr size_t kPieceValues = 128;
constexpr int kLineValues = 2 * kPanel;
constexpr size_t kMostExceptions = 256;  // one in so many values: each costs as much as many others

int exponent_of(bf16 value) { return value.bits >> 7 & 0xff; }
bool is_zero(bf16 value) { return (value.bits & 0x7fff) == 0; }

// Where a value of a panel in bf12 is: the byte of its sign and mantissa, and that of its code, in which half.
struct Bf12Place {
    size_t byte, code;
    int shift;

    explicit Bf12Place(size_t at) {  // as bfloat16 packs it
        const size_t piece = at / kPieceValues * (kPieceValues * 3 / 2), in_piece = at % kPieceValues;
        const size_t half = in_piece / 64, line = in_piece / 32 % 2, in_line = in_piece % 32;
        const size_t in_half = in_line / 8 * 16 + line * 8 + in_line % 8;
        byte = piece + half * 64 + in_half;
        code = piece + 128 + in_half;
        shift = int(half) * 4;
    }
};

bf16 unpack_bf12(const char* panel, size_t at, const uint8_t* high) {
    const Bf12Place place(at);
    const unsigned byte = static_cast<uint8_t>(panel[place.byte]);
    const unsigned code = static_cast<uint8_t>(panel[place.code]) >> place.shift & (kCodes - 1);
    return {static_cast<uint16_t>(((byte & 0x80) | high[code]) << 8 | (code & 1) << 7 | (byte & 0x7f))};
}

// Code c is for the exponent `lowest + c`, or a zero. Lowest is even, and such that the fewest values are exceptions.
struct Exponents {
    int lowest = 0;
    size_t exceptions = 0;

    Exponents(const bf16* values, size_t count) {
        size_t found[kExponents] = {}, most = 0, zeros = 0;
        uint32_t apart[4][kExponents] = {};  // else each addition waits for the one before
        constexpr size_t kChunk = size_t{1} << 30;
        for (size_t first = 0; first < count; first += kChunk) {
            const size_t last = count - first < kChunk ? count : first + kChunk;
            for (size_t i = first; i < last; ++i) {
                ++apart[i % 4][exponent_of(values[i])];
                zeros += is_zero(values[i]);
            }
            for (auto& part : apart) {
                for (int i = 0; i < kExponents; ++i) found[i] += part[i], part[i] = 0;
            }
        }
        for (int from = 0; from + kCodes <= kExponents; from += 2) {
            size_t inside = 0;
            for (int code = 1; code < kCodes; ++code) inside += found[from + code];
            if (inside > most) most = inside, lowest = from;
        }
        exceptions = count - zeros - most;
    }

    // 0: none.
    int code(bf16 value) const {
        const int above = exponent_of(value) - lowest;
        return above > 0 && above < kCodes ? above : 0;
    }
};

// To every other 8 bytes of `bytes` and `codes`, there in the given half. Returns whether no value is an exception.
bool pack_line(const bf16* values, int lowest, size_t half, char* bytes, char* codes) {
    uint8_t byte[kLineValues], code[kLineValues];
    unsigned exceptions = 0;
    for (int i = 0; i < kLineValues; ++i) {
        const uint16_t bits = values[i].bits;
        const uint16_t above = uint16_t((bits >> 7 & 0xff) - lowest);
        const bool coded = uint16_t(above - 1) < kCodes - 1, zero = (bits & 0x7fff) == 0;
        byte[i] = (coded || zero) ? (bits >> 8 & 0x80) | (bits & 0x7f) : 0;
        code[i] = coded ? above << half * 4 : 0;
        exceptions += !(coded || zero);
    }
    for (int i = 0; i < kLineValues; i += 8) {
        std::memcpy(bytes + i * 2, byte + i, 8);
        for (int k = 0; k < 8; ++k) codes[i * 2 + k] |= char(code[i + k]);
    }
    return exceptions == 0;
}

void pack_bf12(PackedMatrix& packed, const bf16* rows, const Exponents& exponents, Arena& arena) {
    auto* const high = static_cast<uint8_t*>(arena.allocate(kLine));
    for (size_t i = 0; i < kLine; ++i) high[i] = i % kCodes ? (exponents.lowest + i % kCodes) >> 1 : 0;
    auto* const first = static_cast<uint32_t*>(arena.allocate((packed.panels() + 1) * sizeof(uint32_t)));
    auto* const listed = static_cast<Exception*>(arena.allocate((exponents.exceptions + 1) * sizeof(Exception)));
    packed.high = high;
    packed.first_exception = first;
    packed.exceptions = listed;
    uint32_t count = 0;
    for (int panel = 0; panel < packed.panels(); ++panel) {
        first[panel] = count;
        char* piece = packed.data + panel * packed.panel_bytes();
        for (int line = 0; line < packed.depth / 2; ++line) {
            bf16 values[kLineValues] = {};
            for (int i = 0; i < kPanel && panel * kPanel + i < packed.outputs; ++i) {
                std::memcpy(values + i * 2, rows + size_t(panel * kPanel + i) * packed.depth + line * 2, kUnit);
            }
            const size_t half = line / 2 % 2, in_half = line % 2;
            if (!pack_line(values, exponents.lowest, half, piece + half * 64 + in_half * 8, piece + 128 + in_half * 8)) {
                for (int i = 0; i < kLineValues; ++i) {
                    if (is_zero(values[i]) || exponents.code(values[i])) continue;
                    assert(count < exponents.exceptions);
                    listed[count++] = {uint32_t(line * kLineValues + i), values[i]};
                }
            }
            if (line % 4 == 3) piece += kPieceValues * 3 / 2;
        }
    }
    first[packed.panels()] = count;
}

// ---- int8 and int4

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
        case Format::bf12: return size_t(depth) / kGroup * (kBf12Group / kPanel);
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

PackedMatrix PackedMatrix::from(const MatrixRows& rows, int outputs, int depth, bool narrow, Arena& arena) {
    PackedMatrix packed;
    packed.outputs = outputs;
    packed.depth = depth;
    packed.format = rows.format;
    if (outputs < 1 || depth < 1 || (packed.quantized() ? depth % kGroup : row_bytes(rows.format, depth) % kUnit)) {
        throw std::invalid_argument("a matrix needs whole pairs of columns in bfloat16, and 32 in int8 or int4");
    }
    std::optional<Exponents> exponents;
    if (narrow && rows.format == Format::bf16 && depth % kGroup == 0) {
        const size_t count = size_t(outputs) * depth;
        exponents.emplace(static_cast<const bf16*>(rows.values), count);
        if (exponents->exceptions * kMostExceptions <= count) packed.format = Format::bf12;
    }
    packed.data = static_cast<char*>(arena.allocate(packed.panels() * packed.panel_bytes()));
    if (packed.quantized()) {
        pack_groups(packed, rows);
    } else if (packed.format == Format::bf12) {
        pack_bf12(packed, static_cast<const bf16*>(rows.values), *exponents, arena);
    } else {
        pack_plain(packed, static_cast<const char*>(rows.values));
    }
    return packed;
}

void PackedMatrix::unpack_row(int output, float* to) const {
    const int index = output / kPanel;
    const char* at = panel(index);
    output %= kPanel;
    if (format == Format::bf12) {
        for (int i = 0; i < depth; ++i) {
            const size_t place = size_t(i / 2) * 2 * kPanel + output * 2 + i % 2;
            to[i] = widened(unpack_bf12(at, place, high));
        }
        for (uint32_t i = first_exception[index]; i < first_exception[index + 1]; ++i) {
            const Exception& one = exceptions[i];
            if (int(one.at / 2 % kPanel) == output) to[one.at / (2 * kPanel) * 2 + one.at % 2] = widened(one.value);
        }
        return;
    }
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
        bf16 pair[2];
        std::memcpy(pair, at, 4);
        to[i] = widened(pair[0]);
        to[i + 1] = widened(pair[1]);
    }
}

}  // namespace kvrelay
