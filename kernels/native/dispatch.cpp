// What this machine has: its instruction sets, and their tables.
#include <unistd.h>
#if defined(KVRELAY_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#endif

#include <stdexcept>

#include "fetch.h"
#include "kernel_table.h"

namespace kvrelay {

#if defined(_SC_LEVEL1_DCACHE_SIZE)
const bool kLargeFirstLevel = sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10;
#else
const bool kLargeFirstLevel = false;
#endif

extern const KernelTable kBaselineBf16, kBaselineF32;
#if defined(__x86_64__)
extern const KernelTable kAvx2Bf16, kAvx2F32, kAvx512Bf16, kAvx512F32, kAvx512VnniBf16, kAvx512VnniF32,
    kAvx512Bf16Bf16;
#endif
#if defined(KVRELAY_AMX)
extern const KernelTable kAmxBf16;
#endif

namespace {

struct Isa {
    const char* name;
    bool usable;
    const KernelTable* in_bf16;
    const KernelTable* in_f32;
};

#if defined(KVRELAY_AMX)
// The processor has tiles of bfloat16 and of bytes, and the kernel lets this process use them: all of its threads, also
// those that run already. It is asked once, and refuses where a thread's signal stack is too small for their state.
bool may_use_tiles() {
    static const bool allowed = [] {
        constexpr int kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
        constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, bytes
        unsigned a, b, c, d;
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kNeeded) != kNeeded) return false;
        return syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
    }();
    return allowed;
}
#endif

std::vector<Isa> isas() {
    std::vector<Isa> found;
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    const bool dot = vnni && __builtin_cpu_supports("avx512bf16");
#if defined(KVRELAY_AMX)
    found.push_back({"amx_bf16", dot && may_use_tiles(), &kAmxBf16, &kAvx512VnniF32});
#endif
    found.push_back({"avx512_bf16", dot, &kAvx512Bf16Bf16, &kAvx512VnniF32});
    found.push_back({"avx512_vnni", vnni, &kAvx512VnniBf16, &kAvx512VnniF32});
    found.push_back({"avx512", avx512, &kAvx512Bf16, &kAvx512F32});
    found.push_back({"avx2", avx2, &kAvx2Bf16, &kAvx2F32});
#endif
    found.push_back({"baseline", true, &kBaselineBf16, &kBaselineF32});
    return found;
}

}  // namespace

std::vector<std::string> usable_isas() {
    std::vector<std::string> names;
    for (const Isa& isa : isas()) {
        if (isa.usable) names.push_back(isa.name);
    }
    return names;
}

const KernelTable& kernel_table(const std::string& name, Dtype weights) {
    std::string known;
    for (const Isa& isa : isas()) {
        if (!isa.usable) continue;
        if (name == isa.name) return weights == Dtype::bf16 ? *isa.in_bf16 : *isa.in_f32;
        known += known.empty() ? isa.name : std::string(", ") + isa.name;
    }
    throw std::invalid_argument("this machine cannot run " + name + ", only " + known);
}

}  // namespace kvrelay
