#include "machine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "arena.h"

namespace kvrelay {

namespace {

constexpr int kRounds = 200000;

template <class Work>
double least_seconds(int repeats, Work work) {
    double least = 1e9;
    for (int i = 0; i < repeats; ++i) {
        const auto start = std::chrono::steady_clock::now();
        work();
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
        least = std::min(least, taken.count());
    }
    return least;
}

}  // namespace

Machine::Machine(Dtype dtype, const std::string& isa, std::shared_ptr<ThreadPool> pool)
    : table_(kernel_table(isa, dtype)), pool_(std::move(pool)) {}

double Machine::read_rate(size_t bytes, int repeats) const {
    const HugeBlock block(bytes);
    std::memset(block.data(), 1, bytes);
    std::atomic<uint32_t> keep{0};
    double best = 0;
    for (int variant = 0; variant < kReadVariants; ++variant) {
        const double seconds = least_seconds(repeats, [&] {
            pool_->run([&](int thread, Team& team) {
                const size_t share = bytes / team.threads();
                keep ^= table_.read_all(static_cast<const char*>(block.data()) + share * thread, share, variant);
            });
        });
        best = std::max(best, bytes / seconds);
    }
    return best;
}

double Machine::multiply_rate(int repeats) const {
    std::atomic<int64_t> operations{0};
    const double seconds = least_seconds(repeats, [&] {
        operations = 0;
        pool_->run([&](int, Team&) { operations += table_.multiply(kRounds); });
    });
    return operations / seconds;
}

}  // namespace kvrelay
