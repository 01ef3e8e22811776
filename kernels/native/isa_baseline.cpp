#include "table_of.h"

namespace kvrelay {

extern const KernelTable kBaselineBf16, kBaselineF32;
const KernelTable kBaselineBf16 = table_of<Baseline, bf16>("baseline");
const KernelTable kBaselineF32 = table_of<Baseline, float>("baseline");

}  // namespace kvrelay
