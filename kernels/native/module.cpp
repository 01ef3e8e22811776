// The extension `kernels._native`. Tensors come as addresses: `kernels/cpu.py` has checked their types and shapes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "batch.h"
#include "decoder.h"
#include "machine.h"
#include "operations.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvrelay;

namespace {

using Address = uintptr_t;

template <class T = void>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

void forward(Decoder& decoder, Address tokens, Address positions, int64_t count, Address kv, int64_t pages,
             const Batch& batch, const std::optional<nb::callable>& on_layer, int group_layers, Address logit_rows,
             int64_t logit_count, Address logits) {
    const Step step{at<int64_t>(tokens), at<int64_t>(positions), count,       at(kv),
                    pages,               at<int64_t>(logit_rows), logit_count, at<float>(logits)};
    std::function<void(int)> call;
    if (on_layer) {
        call = [&](int layer) {
            nb::gil_scoped_acquire held;
            (*on_layer)(layer);
        };
    }
    nb::gil_scoped_release released;
    decoder.forward(step, batch, call, group_layers);
}

}  // namespace

NB_MODULE(_native, module) {
    module.def("usable_isas", &usable_isas, "Instruction sets this machine can run, widest first.");

    nb::enum_<Dtype>(module, "Dtype").value("bfloat16", Dtype::bf16).value("float32", Dtype::f32);

    nb::enum_<Format>(module, "Format")
        .value("bfloat16", Format::bf16)
        .value("float32", Format::f32)
        .value("int8", Format::int8)
        .value("int4", Format::int4);

    nb::class_<MatrixRows>(module, "MatrixRows")
        .def(
            "__init__",
            [](MatrixRows* self, Format format, Address values, Address scales, Address minimums) {
                new (self) MatrixRows{format, at(values), at(scales), at(minimums)};
            },
            "format"_a, "values"_a, "scales"_a = 0, "minimums"_a = 0);

    nb::class_<ThreadPool>(module, "ThreadPool")
        .def(nb::init<int>(), "threads"_a)
        .def_prop_ro("threads", &ThreadPool::threads);

    nb::class_<Batch>(module, "Batch")
        .def(nb::init<std::vector<int>, std::vector<int>, const std::vector<std::vector<int32_t>>&, int>(),
             "query_lens_tokens"_a, "context_lens_tokens"_a, "block_tables"_a, "page_size"_a);

    nb::class_<Decoder>(module, "Decoder")
        .def(
            "__init__",
            [](Decoder* self, int hidden, int intermediate, int heads, int kv_heads, int head_dim, int vocab,
               float eps, Dtype dtype, const std::string& isa, std::shared_ptr<ThreadPool> pool) {
                new (self) Decoder({hidden, intermediate, heads, kv_heads, head_dim, vocab, eps, dtype}, isa, pool);
            },
            "hidden"_a, "intermediate"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "vocab"_a, "eps"_a, "dtype"_a,
            "isa"_a, "pool"_a)
        .def(
            "add_layer",
            [](Decoder& self, Address attention_norm, const MatrixRows& qkv, Address qkv_bias, Address q_norm,
               Address k_norm, const MatrixRows& attention_out, Address mlp_norm, const MatrixRows& gate_up,
               const MatrixRows& down, int window) {
                self.add_layer({at(attention_norm), at(qkv_bias), at(q_norm), at(k_norm), at(mlp_norm), qkv,
                                attention_out, gate_up, down, window});
            },
            "attention_norm"_a, "qkv"_a, "qkv_bias"_a, "q_norm"_a, "k_norm"_a, "attention_out"_a, "mlp_norm"_a,
            "gate_up"_a, "down"_a, "window"_a, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "set_ends",
            [](Decoder& self, const std::optional<MatrixRows>& embedding, Address final_norm, const MatrixRows& head,
               Address cos_sin, int64_t positions) {
                self.set_ends(embedding, at(final_norm), head, at<float>(cos_sin), positions);
            },
            "embedding"_a.none(), "final_norm"_a, "head"_a, "cos_sin"_a, "positions"_a,
            nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("weight_bytes", &Decoder::weight_bytes)
        .def("forward", &forward, "tokens"_a, "positions"_a, "count"_a, "kv"_a, "pages"_a, "batch"_a,
             "on_layer"_a.none(), "group_layers"_a, "logit_rows"_a, "logit_count"_a, "logits"_a);

    nb::class_<Machine>(module, "Machine")
        .def(nb::init<Dtype, const std::string&, std::shared_ptr<ThreadPool>>(), "dtype"_a, "isa"_a, "pool"_a)
        .def("read_rate", &Machine::read_rate, "bytes"_a, "repeats"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("multiply_rate", &Machine::multiply_rate, "repeats"_a, nb::call_guard<nb::gil_scoped_release>());

    nb::class_<Operations>(module, "Operations")
        .def(nb::init<Dtype, const std::string&, std::shared_ptr<ThreadPool>>(), "dtype"_a, "isa"_a, "pool"_a)
        .def(
            "append",
            [](const Operations& self, Address k, int64_t k_stride, Address v, int64_t v_stride, Address layer_kv,
               int64_t pages, int64_t width, const Batch& batch) {
                self.append(at(k), k_stride, at(v), v_stride, at(layer_kv), pages, width, batch);
            },
            "k"_a, "k_stride"_a, "v"_a, "v_stride"_a, "layer_kv"_a, "pages"_a, "width"_a, "batch"_a,
            nb::call_guard<nb::gil_scoped_release>())
        .def(
            "attention",
            [](Operations& self, Address q, Address out, Address layer_kv, int64_t pages, int page_size, int heads,
               int kv_heads, int head_dim, float scale, float soft_cap, int window, const Batch& batch) {
                self.attention(at(q), at(out), heads, pages,
                               {at(layer_kv), self.dtype(), page_size, kv_heads, head_dim, scale, soft_cap, window}, batch);
            },
            "q"_a, "out"_a, "layer_kv"_a, "pages"_a, "page_size"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a,
            "soft_cap"_a, "window"_a, "batch"_a, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "linear",
            [](const Operations& self, Address x, int rows, const MatrixRows& weights, int outputs, int depth,
               Address out) { self.linear(at(x), rows, weights, outputs, depth, at(out)); },
            "x"_a, "rows"_a, "weights"_a, "outputs"_a, "depth"_a, "out"_a, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "rms_norm",
            [](const Operations& self, Address x, Address weight, Address out, int64_t rows, int width, float eps) {
                self.rms_norm(at(x), at(weight), at(out), rows, width, eps);
            },
            "x"_a, "weight"_a, "out"_a, "rows"_a, "width"_a, "eps"_a, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "silu_and_mul",
            [](const Operations& self, Address x, Address out, int64_t rows, int width) {
                self.silu_and_mul(at(x), at(out), rows, width);
            },
            "x"_a, "out"_a, "rows"_a, "width"_a, nb::call_guard<nb::gil_scoped_release>());
}
