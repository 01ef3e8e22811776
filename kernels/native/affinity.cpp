#include "affinity.h"

namespace kvrelay {

namespace {

cpu_set_t mine() {
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof set, &set);
    return set;
}

}  // namespace

Cores::Cores(int count) {
    const cpu_set_t all = mine();
    if (CPU_COUNT(&all) < count) {
        shares_.assign(count, all);
        return;
    }
    shares_.resize(count);
    for (cpu_set_t& share : shares_) CPU_ZERO(&share);
    for (int core = 0, dealt = 0; core < CPU_SETSIZE; ++core) {
        if (CPU_ISSET(core, &all)) CPU_SET(core, &shares_[dealt++ % count]);
    }
}

cpu_set_t Cores::take(int thread) const {
    const cpu_set_t before = mine();
    sched_setaffinity(0, sizeof shares_[thread], &shares_[thread]);
    return before;
}

void Cores::give_back(const cpu_set_t& before) { sched_setaffinity(0, sizeof before, &before); }

}  // namespace kvrelay
