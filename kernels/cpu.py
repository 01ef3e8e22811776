"""The kernels in C++ (`kernels/native`): a whole step in one call, without the GIL.

float32 and bfloat16 run natively, float16 as in the reference, and so does what has no faster form.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kernels import _native
from kernels.base import AttentionBatch
from kernels.decoder import Decoder, ForwardPass
from kernels.quantized_matrix import Matrix, QuantizedMatrix
from kernels.reference import Plan as ReferencePlan
from kernels.reference import ReferenceKernels

_DTYPES = {torch.bfloat16: _native.Dtype.bfloat16, torch.float32: _native.Dtype.float32}
_FORMATS = {torch.bfloat16: _native.Format.bfloat16, torch.float32: _native.Format.float32}
_QUANTIZED_FORMATS = {8: _native.Format.int8, 4: _native.Format.int4}


def usable_isas() -> list[str]:
    """The instruction sets this machine can run, widest first; "baseline" is plain C++."""
    return _native.usable_isas()


@dataclass(frozen=True)
class Plan:
    """`native` is what C++ needs; the reference's plan is made once something asks for it."""

    batch: AttentionBatch
    native: _native.Batch

    @cached_property
    def reference(self) -> ReferencePlan:
        return ReferenceKernels().plan(self.batch, torch.device("cpu"))


class CpuKernels(ReferenceKernels):
    """See `kernels.base.Kernels`."""

    name = "cpu"
    keeps_quantized = True

    def __init__(self, isa: str | None = None, threads: int | None = None) -> None:
        """`isa` is one of `usable_isas()`, by default the widest; `threads` is by default torch's number.

        Raises ValueError for an instruction set that this machine cannot run.
        """
        self.isa = isa or usable_isas()[0]
        self.threads = threads or torch.get_num_threads()
        self._pool = _native.ThreadPool(self.threads)
        self._operations = {
            dtype: _native.Operations(native, self.isa, self._pool) for dtype, native in _DTYPES.items()
        }

    def compile(self, decoder: Decoder) -> ForwardPass:
        if decoder.dtype not in _DTYPES:
            return super().compile(decoder)
        return NativePass(decoder, self.isa, self._pool)

    def plan(self, batch: AttentionBatch, device: torch.device) -> Plan:
        assert device.type == "cpu"
        batch.check()
        tables = [list(table) for table in batch.block_tables]
        native = _native.Batch(batch.query_lens_tokens, batch.context_lens_tokens, tables, batch.page_size)
        return Plan(batch, native)

    def append(self, k: Tensor, v: Tensor, layer_kv: Tensor, plan: Plan) -> None:
        if k.dtype not in _DTYPES:
            super().append(k, v, layer_kv, plan.reference)
            return
        assert k.shape == v.shape == (plan.batch.tokens, *layer_kv.shape[-2:])
        k, v = k.flatten(1), v.flatten(1)
        assert k.stride(1) == v.stride(1) == 1
        assert k.dtype == v.dtype == layer_kv.dtype
        self._operations[k.dtype].append(
            k=k.data_ptr(),
            k_stride=k.stride(0),
            v=v.data_ptr(),
            v_stride=v.stride(0),
            layer_kv=_address(layer_kv),
            pages=len(layer_kv),
            width=k.shape[1],
            batch=plan.native,
        )

    def attention(
        self,
        q: Tensor,
        layer_kv: Tensor,
        plan: Plan,
        *,
        scale: float,
        sliding_window: int | None = None,
        logit_soft_cap: float | None = None,
    ) -> Tensor:
        if q.dtype not in _DTYPES:
            return super().attention(
                q,
                layer_kv,
                plan.reference,
                scale=scale,
                sliding_window=sliding_window,
                logit_soft_cap=logit_soft_cap,
            )
        pages, _, page_size, kv_heads, head_dim = layer_kv.shape
        tokens, heads, _ = q.shape
        assert tokens == plan.batch.tokens
        assert page_size == plan.batch.page_size
        assert q.shape[2] == head_dim
        assert heads % kv_heads == 0
        assert q.dtype == layer_kv.dtype
        q = q.contiguous()
        out = torch.empty_like(q)
        self._operations[q.dtype].attention(
            q=_address(q),
            out=_address(out),
            layer_kv=_address(layer_kv),
            pages=pages,
            page_size=page_size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=scale,
            soft_cap=logit_soft_cap or 0.0,
            window=sliding_window or 0,
            batch=plan.native,
        )
        return out

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """In C++ for a quantized matrix, which is packed for this call alone: a pass keeps its own."""
        if not isinstance(weight, QuantizedMatrix) or x.dtype not in _DTYPES:
            return super().linear(x, weight, bias)
        (rows, depth), outputs = x.shape, len(weight.scales)
        assert weight.shape == (outputs, depth)
        x = x.contiguous()
        out = x.new_empty(rows, outputs)
        self._operations[x.dtype].linear(
            x=_address(x),
            rows=rows,
            weights=_matrix(weight, x.dtype),
            outputs=outputs,
            depth=depth,
            out=_address(out),
        )
        return out if bias is None else out + bias

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in _DTYPES:
            return super().rms_norm(x, weight, eps)
        assert x.dtype == weight.dtype
        assert x.shape[-1:] == weight.shape
        x = x.contiguous()
        out = torch.empty_like(x)
        self._operations[x.dtype].rms_norm(
            x=_address(x),
            weight=_address(weight),
            out=_address(out),
            rows=x.numel() // len(weight),
            width=len(weight),
            eps=eps,
        )
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        if x.dtype not in _DTYPES:
            return super().silu_and_mul(x)
        rows, width = x.shape
        assert width % 2 == 0
        x = x.contiguous()
        out = x.new_empty(rows, width // 2)
        self._operations[x.dtype].silu_and_mul(x=_address(x), out=_address(out), rows=rows, width=width // 2)
        return out


class NativePass:
    """See `kernels.decoder.ForwardPass`. Weights are packed, and the tensors they came from are not kept."""

    def __init__(self, decoder: Decoder, isa: str, pool: _native.ThreadPool) -> None:
        vocab, hidden = decoder.embedding.shape
        dtype = decoder.dtype
        self._dtype, self._vocab = dtype, vocab
        self._kv_row = (decoder.kv_heads, decoder.head_dim)
        self._layers = 0
        self._native = _native.Decoder(
            hidden=hidden,
            intermediate=decoder.intermediate_size,
            heads=decoder.heads,
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            vocab=vocab,
            eps=decoder.rms_norm_eps,
            dtype=_DTYPES[dtype],
            isa=isa,
            pool=pool,
        )
        q_width, kv_width = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
        for layer in decoder.layers:
            qkv_width = q_width + 2 * kv_width

            def weight(tensor: Tensor | None, *shape: int) -> int:
                assert tensor is None or (tensor.dtype == dtype and tensor.shape == shape)
                return 0 if tensor is None else _address(tensor)

            def matrix(weights: Matrix, *shape: int) -> _native.MatrixRows:
                assert weights.shape == shape
                return _matrix(weights, dtype)

            self._native.add_layer(
                attention_norm=weight(layer.attention_norm, hidden),
                qkv=matrix(layer.qkv, qkv_width, hidden),
                qkv_bias=weight(layer.qkv_bias, qkv_width),
                q_norm=weight(layer.q_norm, decoder.head_dim),
                k_norm=weight(layer.k_norm, decoder.head_dim),
                attention_out=matrix(layer.attention_out, hidden, q_width),
                mlp_norm=weight(layer.mlp_norm, hidden),
                gate_up=matrix(layer.gate_up, 2 * decoder.intermediate_size, hidden),
                down=matrix(layer.down, hidden, decoder.intermediate_size),
                window=layer.window_tokens or 0,
            )
            self._layers += 1
        self._cos_sin = decoder.cos_sin  # read in place
        self._native.set_ends(
            embedding=None if decoder.tied else _matrix(decoder.embedding, dtype),
            final_norm=_address(decoder.final_norm),
            head=_matrix(decoder.head, dtype),
            cos_sin=_address(decoder.cos_sin),
            positions=len(decoder.cos_sin),
        )

    @property
    def weight_bytes(self) -> int:
        """What the packed matrices take."""
        return self._native.weight_bytes

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: Tensor,
        plan: Plan,
        on_layer: Callable[[int], None] | None,
        logit_rows: Tensor,
        group_layers: int = 1,
    ) -> Tensor:
        """Raises ValueError for a token, position, page or row that is not there."""
        layers, pages, _, page_size, *kv_row = kv.shape
        assert tokens.dtype == positions.dtype == logit_rows.dtype == torch.int64
        assert tokens.shape == positions.shape
        assert kv.dtype == self._dtype
        assert layers == self._layers
        assert tuple(kv_row) == self._kv_row
        assert page_size == plan.batch.page_size
        logits = torch.empty(len(logit_rows), self._vocab)
        self._native.forward(
            tokens=_address(tokens),
            positions=_address(positions),
            count=len(tokens),
            kv=_address(kv),
            pages=pages,
            batch=plan.native,
            on_layer=on_layer,
            group_layers=group_layers,
            logit_rows=_address(logit_rows),
            logit_count=len(logit_rows),
            logits=_address(logits),
        )
        return logits


def _matrix(weights: Matrix, dtype: torch.dtype) -> _native.MatrixRows:
    if not isinstance(weights, QuantizedMatrix):
        assert weights.dtype == dtype
        return _native.MatrixRows(_FORMATS[dtype], _address(weights))
    minimums = 0 if weights.minimums is None else _address(weights.minimums)
    return _native.MatrixRows(
        _QUANTIZED_FORMATS[weights.bits], _address(weights.codes), _address(weights.scales), minimums
    )


def _address(tensor: Tensor) -> int:
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    return tensor.data_ptr()
