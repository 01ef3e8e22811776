#include "table_of.h"

namespace kvrelay {

// In float32 it has nothing beyond AVX-512 with VNNI, whose table serves there.
extern const KernelTable kAmxBf16;
const KernelTable kAmxBf16 = table_of<Amx, bf16>("amx_bf16");

}  // namespace kvrelay
