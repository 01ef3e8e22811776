// Single operations on whole tensors, as `kernels.base.Kernels` names them.
#pragma once

#include <memory>
#include <string>

#include "batch_attention.h"
#include "kernel_table.h"
#include "thread_pool.h"

namespace kvrelay {

// Tensors are row-major, of one type; `*_stride` is in values.
class Operations {
  public:
    Operations(Dtype dtype, const std::string& isa, std::shared_ptr<ThreadPool> pool);

    Dtype dtype() const { return dtype_; }

    // k, v [tokens, width] into `layer_kv` [pages, 2, page_size, width].
    void append(const void* k, int64_t k_stride, const void* v, int64_t v_stride, void* layer_kv, int64_t pages,
                int64_t width, const Batch& batch) const;

    // q, out [tokens, heads, head_dim]. Throws std::invalid_argument for a page that is not there.
    void attention(const void* q, void* out, int heads, int64_t pages, const PagedKV& kv, const Batch& batch);

    // out [rows, outputs] = x [rows, depth] times the rows of `weights`, which are packed for this call alone.
    void linear(const void* x, int rows, const MatrixRows& weights, int outputs, int depth, void* out) const;

    // x, out [rows, width]; weight [width].
    void rms_norm(const void* x, const void* weight, void* out, int64_t rows, int width, float eps) const;

    // x [rows, 2 width], out [rows, width].
    void silu_and_mul(const void* x, void* out, int64_t rows, int width) const;

  private:
    const Dtype dtype_;
    const KernelTable& table_;
    const std::shared_ptr<ThreadPool> pool_;
    BatchAttention attention_;
    Scratch wide_, q_, out_;
};

}  // namespace kvrelay
