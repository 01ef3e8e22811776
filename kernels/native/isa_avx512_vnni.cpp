#include "table_of.h"

namespace kvrelay {

extern const KernelTable kAvx512VnniBf16, kAvx512VnniF32;
const KernelTable kAvx512VnniBf16 = table_of<Avx512Vnni, bf16>("avx512_vnni");
const KernelTable kAvx512VnniF32 = table_of<Avx512Vnni, float>("avx512_vnni");

}  // namespace kvrelay
