// Where threads may run.
#pragma once

#include <sched.h>

#include <vector>

namespace kvrelay {

// The cores of the calling thread, dealt to `count` threads: none are shared while there are enough.
//
// Left alone, the scheduler of a small machine likes to keep threads that wake each other on one core.
class Cores {
  public:
    explicit Cores(int count);

    // Move the calling thread to its share; returns where it might run before.
    cpu_set_t take(int thread) const;

    static void give_back(const cpu_set_t& before);

  private:
    std::vector<cpu_set_t> shares_;
};

}  // namespace kvrelay
