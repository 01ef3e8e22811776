// Which products an instruction set takes.
#pragma once

#include "gemm.h"
#include "tile_gemm.h"

namespace kvrelay {
namespace {

template <class Isa, class Weight>
struct ProductsOf {
    using type = Gemm<Isa, Weight>;
};

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
template <>
struct ProductsOf<Amx, bf16> {
    using type = TileGemm<Amx>;
};
#endif

template <class Isa, class Weight>
using Products = typename ProductsOf<Isa, Weight>::type;

}  // namespace
}  // namespace kvrelay
