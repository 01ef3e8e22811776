// Measures what this machine can do right now with a pool's threads.
#pragma once

#include <memory>
#include <string>

#include "kernel_table.h"
#include "thread_pool.h"

namespace kvrelay {

class Machine {
  public:
    Machine(Dtype dtype, const std::string& isa, std::shared_ptr<ThreadPool> pool);

    // Bytes per second of the fastest way to read `bytes` in huge pages.
    double read_rate(size_t bytes, int repeats) const;

    // Operations per second of multiplying activations with weights in registers.
    double multiply_rate(int repeats) const;

  private:
    const KernelTable& table_;
    const std::shared_ptr<ThreadPool> pool_;
};

}  // namespace kvrelay
