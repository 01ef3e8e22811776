// A decoder of the Llama family, packed: a whole step in one call.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "batch_attention.h"
#include "kernel_table.h"
#include "thread_pool.h"

namespace kvrelay {

struct DecoderShape {
    int hidden, intermediate, heads, kv_heads, head_dim, vocab;
    float eps;
    Dtype dtype;  // of weights and KV
};

// Row-major weights of one layer, norms and biases of the decoder's type; those that it lacks are null.
struct LayerRows {
    const void *attention_norm, *qkv_bias, *q_norm, *k_norm, *mlp_norm;
    MatrixRows qkv, attention_out, gate_up, down;
    int window;  // tokens a token sees, itself included; 0: all
};

struct Step {
    const int64_t* tokens;
    const int64_t* positions;
    int64_t count;
    void* kv;  // [layers, pages, 2, page_size, kv_heads, head_dim]
    int64_t pages;
    const int64_t* logit_rows;
    int64_t logit_count;
    float* logits;  // [logit_count, vocab]
};

class Decoder {
  public:
    Decoder(const DecoderShape& shape, const std::string& isa, std::shared_ptr<ThreadPool> pool);

    // The weights are copied. Without an `embedding` it is the same as the head; `cos_sin` is read in place.
    void add_layer(const LayerRows& rows);
    void set_ends(const std::optional<MatrixRows>& embedding, const void* final_norm, const MatrixRows& head,
                  const float* cos_sin, int64_t positions);

    // `on_layer`, if given, is called on the caller's thread with the last of every `group_layers` layers and of
    // all. Throws std::invalid_argument when a token, position, page or row is not there.
    void forward(const Step& step, const Batch& batch, const std::function<void(int)>& on_layer, int group_layers);

    size_t weight_bytes() const { return arena_.bytes(); }

  private:
    struct Layer {
        std::vector<float> attention_norm, qkv_bias, q_norm, k_norm, mlp_norm;
        PackedMatrix qkv, attention_out, gate, up, down;
        int window;
    };
    struct Activations {
        float* residual;  // [tokens, hidden]
        float* qkv;       // [tokens, qkv width]
        char* normed;     // [tokens, hidden], input type, as the two below
        char* q;          // [tokens, heads * head_dim]
        char* attended;
        char* gated;      // [tokens, intermediate]
    };

    void check(const Step& step, const Batch& batch) const;
    Activations make_room(int64_t tokens);
    void embed(const Step& step, int thread, Team& team);
    void layer(int index, const Step& step, const Batch& batch, int thread, Team& team);
    void store_heads(const Layer& layer, const Step& step, const Batch& batch, char* layer_kv, int thread, Team& team);
    void logits(const Step& step, int thread, Team& team);
    void norm(const float* x, const std::vector<float>& weight, int64_t rows, int thread, Team& team);
    void product(Product job, int thread, Team& team);

    PackedMatrix pack(const MatrixRows& rows, int outputs, int depth);
    std::vector<float> floats(const void* values, int count) const;

    const DecoderShape shape_;
    const KernelTable& table_;
    const std::shared_ptr<ThreadPool> pool_;
    BatchAttention attention_;
    Arena arena_;
    std::vector<Layer> layers_;
    std::vector<float> final_norm_;
    PackedMatrix head_, embedding_;
    const float* cos_sin_ = nullptr;
    int64_t positions_ = 0;
    Activations now_{};
    Scratch scratch_[6];
    std::vector<Scratch> product_memory_;  // of each thread
};

}  // namespace kvrelay
