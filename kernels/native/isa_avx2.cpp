#include "table_of.h"

namespace kvrelay {

extern const KernelTable kAvx2Bf16, kAvx2F32;
const KernelTable kAvx2Bf16 = table_of<Avx2, bf16>("avx2");
const KernelTable kAvx2F32 = table_of<Avx2, float>("avx2");

}  // namespace kvrelay
