// Memory in huge pages, which a stream of weights reads 10-15 % faster than in pages of 4 KiB.
#pragma once

#include <cstddef>
#include <vector>

namespace kvrelay {

class HugeBlock {
  public:
    HugeBlock() = default;
    explicit HugeBlock(size_t bytes);  // zeroed, aligned to 2 MiB; throws std::bad_alloc
    HugeBlock(HugeBlock&& other) noexcept;
    HugeBlock& operator=(HugeBlock&& other) noexcept;
    ~HugeBlock();

    void* data() const { return aligned_; }
    size_t bytes() const { return bytes_; }

  private:
    void* mapped_ = nullptr;
    void* aligned_ = nullptr;
    size_t mapped_bytes_ = 0;
    size_t bytes_ = 0;
};

// Hands out pieces that live as long as the arena.
class Arena {
  public:
    void* allocate(size_t bytes);  // zeroed, aligned to 64 bytes
    size_t bytes() const { return used_; }

  private:
    std::vector<HugeBlock> blocks_;
    char* next_ = nullptr;
    size_t left_ = 0;
    size_t used_ = 0;
};

// A buffer that only grows. Growing loses what it held.
class Scratch {
  public:
    template <class T>
    T* at_least(size_t count) {
        if (count * sizeof(T) > block_.bytes()) block_ = HugeBlock(count * sizeof(T));
        return static_cast<T*>(block_.data());
    }

  private:
    HugeBlock block_;
};

}  // namespace kvrelay
