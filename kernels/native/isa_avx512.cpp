#include "table_of.h"

namespace kvrelay {

extern const KernelTable kAvx512Bf16, kAvx512F32;
const KernelTable kAvx512Bf16 = table_of<Avx512, bf16>("avx512");
const KernelTable kAvx512F32 = table_of<Avx512, float>("avx512");

}  // namespace kvrelay
