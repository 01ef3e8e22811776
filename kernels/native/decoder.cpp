#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace kvrelay {

namespace {

constexpr int kRowsPerThread = 28;  // from here on threads share rows; each then reads all weights

struct Range {
    int64_t first, last;
};

Range share(int64_t count, int thread, int threads) {
    return {count * thread / threads, count * (thread + 1) / threads};
}

}  // namespace

Decoder::Decoder(const DecoderShape& shape, const std::string& isa, std::shared_ptr<ThreadPool> pool)
    : shape_(shape),
      table_(kernel_table(isa, shape.dtype)),
      pool_(std::move(pool)),
      attention_(table_),
      product_memory_(pool_->threads()) {}

PackedMatrix Decoder::pack(const MatrixRows& rows, int outputs, int depth) {
    return PackedMatrix::from(rows, outputs, depth, table_.narrow_weights, arena_);
}

std::vector<float> Decoder::floats(const void* values, int count) const {
    std::vector<float> wide(values ? count : 0);
    if (values) table_.widen(values, wide.data(), count);
    return wide;
}

void Decoder::add_layer(const LayerRows& rows) {
    const int q_width = shape_.heads * shape_.head_dim;
    const int qkv_width = q_width + 2 * shape_.kv_heads * shape_.head_dim;
    Layer layer;
    layer.attention_norm = floats(rows.attention_norm, shape_.hidden);
    layer.qkv_bias = floats(rows.qkv_bias, qkv_width);
    layer.q_norm = floats(rows.q_norm, shape_.head_dim);
    layer.k_norm = floats(rows.k_norm, shape_.head_dim);
    layer.mlp_norm = floats(rows.mlp_norm, shape_.hidden);
    layer.qkv = pack(rows.qkv, qkv_width, shape_.hidden);
    layer.attention_out = pack(rows.attention_out, shape_.hidden, q_width);
    layer.gate = pack(rows.gate_up, shape_.intermediate, shape_.hidden);
    layer.up = pack(rows.gate_up.below(shape_.intermediate, shape_.hidden), shape_.intermediate, shape_.hidden);
    layer.down = pack(rows.down, shape_.hidden, shape_.intermediate);
    layer.window = rows.window;
    layers_.push_back(std::move(layer));
}

void Decoder::set_ends(const std::optional<MatrixRows>& embedding, const void* final_norm, const MatrixRows& head,
                       const float* cos_sin, int64_t positions) {
    final_norm_ = floats(final_norm, shape_.hidden);
    head_ = pack(head, shape_.vocab, shape_.hidden);
    embedding_ = embedding ? pack(*embedding, shape_.vocab, shape_.hidden) : head_;
    cos_sin_ = cos_sin;
    positions_ = positions;
}

void Decoder::check(const Step& step, const Batch& batch) const {
    if (!head_.data || step.count != batch.tokens()) {
        throw std::invalid_argument(std::to_string(step.count) + " tokens for a batch of " +
                                    std::to_string(batch.tokens()));
    }
    for (int64_t i = 0; i < step.count; ++i) {
        if (step.tokens[i] < 0 || step.tokens[i] >= shape_.vocab) {
            throw std::invalid_argument("token " + std::to_string(step.tokens[i]) + " is not in the vocabulary of " +
                                        std::to_string(shape_.vocab));
        }
        if (step.positions[i] < 0 || step.positions[i] >= positions_) {
            throw std::invalid_argument("position " + std::to_string(step.positions[i]) +
                                        " is beyond the model's context of " + std::to_string(positions_));
        }
    }
    for (int64_t i = 0; i < step.logit_count; ++i) {
        if (step.logit_rows[i] < 0 || step.logit_rows[i] >= step.count) {
            throw std::invalid_argument("no row " + std::to_string(step.logit_rows[i]) + " for logits");
        }
    }
    batch.check_pages(step.pages);
}

Decoder::Activations Decoder::make_room(int64_t tokens) {
    const size_t input = size_of(table_.input);
    const size_t q_width = size_t(shape_.heads) * shape_.head_dim;
    const size_t qkv_width = q_width + 2 * size_t(shape_.kv_heads) * shape_.head_dim;
    return {
        scratch_[0].at_least<float>(tokens * shape_.hidden),
        scratch_[1].at_least<float>(tokens * qkv_width),
        scratch_[2].at_least<char>(tokens * shape_.hidden * input),
        scratch_[3].at_least<char>(tokens * q_width * input),
        scratch_[4].at_least<char>(tokens * q_width * input),
        scratch_[5].at_least<char>(tokens * shape_.intermediate * input),
    };
}

void Decoder::forward(const Step& step, const Batch& batch, const std::function<void(int)>& on_layer,
                      int group_layers) {
    if (group_layers < 1) throw std::invalid_argument("a group has at least one layer");
    check(step, batch);
    if (step.count == 0) return;
    const int layers = static_cast<int>(layers_.size());
    now_ = make_room(step.count);
    attention_.prepare(batch, shape_.heads, shape_.kv_heads, shape_.head_dim, pool_->threads(), layers);
    if (!on_layer) {
        pool_->run([&](int thread, Team& team) {
            embed(step, thread, team);
            for (int i = 0; i < layers; ++i) layer(i, step, batch, thread, team);
            logits(step, thread, team);
        });
        return;
    }
    pool_->run([&](int thread, Team& team) { embed(step, thread, team); });
    for (int first = 0; first < layers; first += group_layers) {
        const int last = std::min(layers - first, group_layers) + first;
        pool_->run([&](int thread, Team& team) {
            for (int i = first; i < last; ++i) layer(i, step, batch, thread, team);
        });
        on_layer(last - 1);
    }
    pool_->run([&](int thread, Team& team) { logits(step, thread, team); });
}

void Decoder::embed(const Step& step, int thread, Team& team) {
    const Range rows = share(step.count, thread, team.threads());
    for (int64_t i = rows.first; i < rows.last; ++i) {
        embedding_.unpack_row(static_cast<int>(step.tokens[i]), now_.residual + i * shape_.hidden);
    }
    team.barrier();
}

void Decoder::norm(const float* x, const std::vector<float>& weight, int64_t rows, int thread, Team& team) {
    const size_t out_bytes = size_t(shape_.hidden) * size_of(table_.input);
    const Range mine = share(rows, thread, team.threads());
    for (int64_t i = mine.first; i < mine.last; ++i) {
        table_.rms_norm(x + i * shape_.hidden, weight.data(), now_.normed + i * out_bytes, shape_.hidden, shape_.eps);
    }
    team.barrier();
}

void Decoder::product(Product job, int thread, Team& team) {
    if (job.rows < kRowsPerThread * team.threads()) {
        const Range mine = share(job.matrix->panels(), thread, team.threads());
        job.first = static_cast<int>(mine.first);
        job.last = static_cast<int>(mine.last);
    } else {
        const Range mine = share(job.rows, thread, team.threads());
        job.x = static_cast<const char*>(job.x) + mine.first * job.matrix->depth * size_of(table_.input);
        const size_t out_bytes = job.up ? size_of(table_.input) : sizeof(float);
        job.out = static_cast<char*>(job.out) + mine.first * job.out_stride * out_bytes;
        job.rows = static_cast<int>(mine.last - mine.first);
        job.first = 0;
        job.last = job.matrix->panels();
    }
    job.memory = product_memory_[thread].at_least<char>(table_.product_bytes(*job.matrix, job.rows));
    table_.product(job);
    team.barrier();
}

void Decoder::layer(int index, const Step& step, const Batch& batch, int thread, Team& team) {
    const Layer& layer = layers_[index];
    const int rows = static_cast<int>(step.count);
    const float* bias = layer.qkv_bias.empty() ? nullptr : layer.qkv_bias.data();
    const size_t layer_bytes = size_t(step.pages) * 2 * batch.page_size() * shape_.kv_heads * shape_.head_dim *
                               size_of(shape_.dtype);
    char* layer_kv = static_cast<char*>(step.kv) + index * layer_bytes;
    const PagedKV kv{layer_kv,        shape_.dtype,  batch.page_size(), shape_.kv_heads,
                     shape_.head_dim, 1.0f / std::sqrt(float(shape_.head_dim)), 0.0f,
                     layer.window};

    norm(now_.residual, layer.attention_norm, rows, thread, team);
    product({now_.normed, rows, &layer.qkv, nullptr, 0, 0, bias, now_.qkv, layer.qkv.outputs, false}, thread, team);
    store_heads(layer, step, batch, layer_kv, thread, team);
    attention_.run(index, kv, now_.q, now_.attended, thread, team);
    team.barrier();
    product({now_.attended, rows, &layer.attention_out, nullptr, 0, 0, nullptr, now_.residual, shape_.hidden, true},
            thread, team);
    norm(now_.residual, layer.mlp_norm, rows, thread, team);
    product({now_.normed, rows, &layer.gate, &layer.up, 0, 0, nullptr, now_.gated, shape_.intermediate, false},
            thread, team);
    product({now_.gated, rows, &layer.down, nullptr, 0, 0, nullptr, now_.residual, shape_.hidden, true}, thread, team);
}

void Decoder::store_heads(const Layer& layer, const Step& step, const Batch& batch, char* layer_kv, int thread,
                          Team& team) {
    const HeadShape heads{
        shape_.heads, shape_.kv_heads, shape_.head_dim,
        layer.q_norm.empty() ? nullptr : layer.q_norm.data(),
        layer.k_norm.empty() ? nullptr : layer.k_norm.data(),
        shape_.eps,
    };
    const size_t q_bytes = size_t(shape_.heads) * shape_.head_dim * size_of(table_.input);
    const size_t kv_bytes = size_t(shape_.kv_heads) * shape_.head_dim * size_of(shape_.dtype);
    const Range rows = share(step.count, thread, team.threads());
    for (int64_t i = rows.first; i < rows.last; ++i) {
        char* key = layer_kv + batch.slot(static_cast<int>(i)) * kv_bytes;
        table_.turn(now_.qkv + i * layer.qkv.outputs, heads, cos_sin_ + step.positions[i] * shape_.head_dim,
                    now_.q + i * q_bytes, key, key + batch.page_size() * kv_bytes);
    }
    team.barrier();
}

void Decoder::logits(const Step& step, int thread, Team& team) {
    if (step.logit_count == 0) return;
    const size_t out_bytes = size_t(shape_.hidden) * size_of(table_.input);
    const Range mine = share(step.logit_count, thread, team.threads());
    for (int64_t i = mine.first; i < mine.last; ++i) {
        table_.rms_norm(now_.residual + step.logit_rows[i] * shape_.hidden, final_norm_.data(),
                        now_.normed + i * out_bytes, shape_.hidden, shape_.eps);
    }
    team.barrier();
    product({now_.normed, static_cast<int>(step.logit_count), &head_, nullptr, 0, 0, nullptr, step.logits,
             shape_.vocab, false},
            thread, team);
}

}  // namespace kvrelay
