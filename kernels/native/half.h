// float16 as plain bits, to read.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvrelay {

// Exact for every finite value: the exponent is moved, and the product puts subnormals right.
inline float half_to_float(uint16_t bits) {
    const uint32_t magnitude = uint32_t(bits & 0x7fff) << 13;
    float value;
    std::memcpy(&value, &magnitude, 4);
    value *= 0x1p112f;
    return bits & 0x8000 ? -value : value;
}

}  // namespace kvrelay
