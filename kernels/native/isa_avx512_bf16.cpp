#include "table_of.h"

namespace kvrelay {

// In float32 it has nothing beyond AVX-512 with VNNI, whose table serves there.
extern const KernelTable kAvx512Bf16Bf16;
const KernelTable kAvx512Bf16Bf16 = table_of<Avx512Bf16, bf16>("avx512_bf16");

}  // namespace kvrelay
