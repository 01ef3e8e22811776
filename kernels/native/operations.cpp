#include "operations.h"

#include <algorithm>
#include <cstring>

namespace kvrelay {

Operations::Operations(Dtype dtype, const std::string& isa, std::shared_ptr<ThreadPool> pool)
    : dtype_(dtype), table_(kernel_table(isa, dtype)), pool_(std::move(pool)), attention_(table_) {}

void Operations::append(const void* k, int64_t k_stride, const void* v, int64_t v_stride, void* layer_kv,
                        int64_t pages, int64_t width, const Batch& batch) const {
    batch.check_pages(pages);
    const size_t value = size_of(dtype_);
    for (int token = 0; token < batch.tokens(); ++token) {
        char* key = static_cast<char*>(layer_kv) + batch.slot(token) * width * value;
        std::memcpy(key, static_cast<const char*>(k) + token * k_stride * value, width * value);
        std::memcpy(key + batch.page_size() * width * value, static_cast<const char*>(v) + token * v_stride * value,
                    width * value);
    }
}

void Operations::attention(const void* q, void* out, int heads, int64_t pages, const PagedKV& kv,
                           const Batch& batch) {
    batch.check_pages(pages);
    const int64_t count = int64_t{batch.tokens()} * heads * kv.head_dim;
    float* wide = wide_.at_least<float>(count);
    char* inputs = q_.at_least<char>(count * size_of(table_.input));
    char* outputs = out_.at_least<char>(count * size_of(table_.input));
    table_.widen(q, wide, count);
    table_.to_input(wide, inputs, count);
    attention_.prepare(batch, heads, kv.kv_heads, kv.head_dim, pool_->threads(), 1);
    pool_->run([&](int thread, Team& team) { attention_.run(0, kv, inputs, outputs, thread, team); });
    table_.from_input(outputs, wide, count);
    table_.narrow(wide, out, count);
}

void Operations::linear(const void* x, int rows, const MatrixRows& weights, int outputs, int depth, void* out) const {
    Arena arena;
    const PackedMatrix matrix = PackedMatrix::from(weights, outputs, depth, table_.narrow_weights, arena);
    std::vector<float> wide(size_t(rows) * std::max(outputs, depth));
    std::vector<char> inputs(size_t(rows) * depth * size_of(table_.input));
    table_.widen(x, wide.data(), int64_t{rows} * depth);
    table_.to_input(wide.data(), inputs.data(), int64_t{rows} * depth);
    pool_->run([&](int thread, Team& team) {
        Scratch memory;
        const int first = matrix.panels() * thread / team.threads();
        const int last = matrix.panels() * (thread + 1) / team.threads();
        table_.product({inputs.data(), rows, &matrix, nullptr, first, last, nullptr, wide.data(), outputs, false,
                        memory.at_least<char>(table_.product_bytes(matrix, rows))});
    });
    table_.narrow(wide.data(), out, int64_t{rows} * outputs);
}

void Operations::rms_norm(const void* x, const void* weight, void* out, int64_t rows, int width, float eps) const {
    std::vector<float> values(width), scales(width), normed(width);
    std::vector<char> inputs(width * size_of(table_.input));
    table_.widen(weight, scales.data(), width);
    for (int64_t row = 0; row < rows; ++row) {
        const size_t at = row * width * size_of(dtype_);
        table_.widen(static_cast<const char*>(x) + at, values.data(), width);
        table_.rms_norm(values.data(), scales.data(), inputs.data(), width, eps);
        table_.from_input(inputs.data(), normed.data(), width);
        table_.narrow(normed.data(), static_cast<char*>(out) + at, width);
    }
}

void Operations::silu_and_mul(const void* x, void* out, int64_t rows, int width) const {
    std::vector<float> values(2 * width), gated(width);
    for (int64_t row = 0; row < rows; ++row) {
        table_.widen(static_cast<const char*>(x) + row * 2 * width * size_of(dtype_), values.data(), 2 * width);
        table_.silu_and_mul(values.data(), values.data() + width, gated.data(), width);
        table_.narrow(gated.data(), static_cast<char*>(out) + row * width * size_of(dtype_), width);
    }
}

}  // namespace kvrelay
