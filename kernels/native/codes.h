// The codes of a group of a panel in int8 or int4.
#pragma once

#include "isa.h"
#include "packed_matrix.h"

namespace kvrelay {
namespace {

template <Format format>
constexpr int group_bytes = format == Format::int8 ? kInt8Group : kInt4Group;

// Four bytes per output at a time: in int4 their low halves are the values of unit i, their high ones of unit i + 4.
template <class Isa, Format format>
struct Codes {
    using U = typename Isa::U;

    static constexpr int count = format == Format::int8 ? kGroup / 4 : kGroup / 8;

    static U low(U codes) { return format == Format::int8 ? codes : codes & 0x0f0f0f0fu; }
    static U high(U codes) { return codes >> 4 & 0x0f0f0f0fu; }
};

}  // namespace
}  // namespace kvrelay
