#include "arena.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>
#include <utility>

namespace kvrelay {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunk = size_t{64} << 20;  // untouched memory costs nothing
constexpr size_t kLine = 64;

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

HugeBlock::HugeBlock(size_t bytes) : bytes_(round_up(bytes, kHugePage)) {
    mapped_bytes_ = bytes_ + kHugePage;
    mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    aligned_ = reinterpret_cast<void*>(round_up(reinterpret_cast<uintptr_t>(mapped_), kHugePage));
    madvise(aligned_, bytes_, MADV_HUGEPAGE);  // a kernel without huge pages says no, and 4 KiB pages do
}

HugeBlock::HugeBlock(HugeBlock&& other) noexcept { *this = std::move(other); }

HugeBlock& HugeBlock::operator=(HugeBlock&& other) noexcept {
    std::swap(mapped_, other.mapped_);
    std::swap(aligned_, other.aligned_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

HugeBlock::~HugeBlock() {
    if (mapped_) munmap(mapped_, mapped_bytes_);
}

void* Arena::allocate(size_t bytes) {
    bytes = round_up(bytes, kLine);
    if (bytes > left_) {
        blocks_.emplace_back(bytes > kChunk ? bytes : kChunk);
        next_ = static_cast<char*>(blocks_.back().data());
        left_ = blocks_.back().bytes();
    }
    used_ += bytes;
    left_ -= bytes;
    return std::exchange(next_, next_ + bytes);
}

}  // namespace kvrelay
