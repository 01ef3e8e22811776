// bfloat16 as plain bits. Always through memcpy: a cast between pointer types is undefined and was miscompiled.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvrelay {

struct bf16 {
    uint16_t bits;
};

}  // namespace kvrelay
