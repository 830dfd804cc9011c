"""CUDA's behaviour for tensors on ``meta`` that represent a GPU's: autocast, kernels, optimizers.
``meta`` tensors bypass autocast's dispatch layer, their attention falls back to plain matrix
products, and their root mean square norm to its parts. Each would change which tensors a step
keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from harness.planner import overhead
from harness.planner.tracing.op_cache import device_of
from harness.planner.tracing.shortcuts import stays_in_backward
from harness.planner.tracing.world import GPU

LOWER = frozenset({
    *("conv1d", "conv2d", "conv3d", "conv_tbc", "convolution", "prelu", "einsum", "linear"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "matmul", "__matmul__"),
    *("addmm", "addmv", "addr", "mm", "mv", "addbmm", "baddbmm", "bmm", "__rmatmul__"),
    *("chain_matmul", "multi_dot", "linalg_multi_dot", "scaled_dot_product_attention"),
})  # fmt: skip
FLOAT32 = frozenset({
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "tan"),
    *("reciprocal", "rsqrt", "sinh", "pow", "__pow__", "square", "softplus", "layer_norm"),
    *("native_layer_norm", "group_norm", "frobenius_norm", "nuclear_norm", "norm", "softmin"),
    *("cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "kl_div"),
    *("hinge_embedding_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "dist"),
    *("margin_ranking_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss"),
    *("binary_cross_entropy_with_logits", "pdist", "cdist", "renorm", "logsumexp", "prod"),
    *("softmax", "log_softmax", "cumprod", "cumsum", "vector_norm", "matrix_norm", "sum"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_vecdot", "rms_norm", "interpolate"),
    *("binary_cross_entropy", "multilabel_margin_loss"),
})  # fmt: skip
WIDEST = frozenset({
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sample"),
    *("index_put", "tensordot", "scatter_add"),
})  # fmt: skip
ALIGNED = 8
"""Alignment, in elements, of the bias strides for memory-efficient attention."""
ATTENTION = torch.nn.functional.scaled_dot_product_attention
DROPOUT = torch.nn.functional.dropout
RMS_NORM = torch.nn.functional.rms_norm
DEVICE = torch.Tensor.device.__get__
GETTER = "__get__"
"""Name of a function that reads a tensor's attribute, such as its device."""


class CudaLike(TorchFunctionMode):
    """Function mode of a prediction for a GPU; ``kind`` is the card's (``overhead.preferred``).
    It applies CUDA's lists of autocast ops. Source: torch 2.13, aten/src/ATen/autocast_mode.h
    (AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE,
    AT_FORALL_PROMOTE)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self._copies: dict[int, tuple[Any, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == GETTER:
            return device_of(args[0]) if func == DEVICE else func(*args, **kwargs)
        if torch.is_autocast_enabled("cuda"):
            args, kwargs = self._autocast(name, args, kwargs)
        elif self._copies:
            self._copies.clear()
        if func is ATTENTION:
            return self._attend(*args, **kwargs)
        if func is RMS_NORM:
            return rms_norm(*args, **kwargs)
        return drop(*args, **kwargs) if func is DROPOUT else func(*args, **kwargs)

    def _autocast(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if name in LOWER:
            wanted = torch.get_autocast_dtype("cuda")
        elif name in FLOAT32:
            wanted = torch.float32
        elif name in WIDEST:
            floats = [t.dtype for t in tree_leaves((args, kwargs)) if _eligible(t)]
            wanted = torch.float32 if torch.float32 in floats else None
        else:
            wanted = None
        if wanted is None:
            return args, kwargs
        return tree_map(lambda leaf: self._cast(leaf, wanted), (args, kwargs))

    def _cast(self, leaf: Any, dtype: torch.dtype) -> Any:
        """Return ``leaf`` in ``dtype``; a weight's low-precision copy is cached until autocast
        ends."""
        if not _eligible(leaf) or leaf.dtype is dtype:
            return leaf
        keep = leaf.requires_grad and leaf.is_leaf and dtype is not torch.float32
        if not keep or not torch.is_autocast_cache_enabled():
            return leaf.to(dtype)
        if id(leaf) not in self._copies:
            self._copies[id(leaf)] = (leaf, leaf.to(dtype))
        return self._copies[id(leaf)][1]

    def _attend(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        *given: Any, **more: Any,
    ) -> Any:  # fmt: skip
        """Compute attention by the kernel that torch takes on such a card, or by plain products."""
        q, k, v = query, key, value
        if q.device.type != GPU:
            return ATTENTION(q, k, v, attn_mask, dropout_p, *given, **more)
        dtype, masked = str(q.dtype).removeprefix("torch."), attn_mask is not None
        switches = torch.backends.cuda  # sdpa_kernel sets them too
        enabled = {
            "flash": switches.flash_sdp_enabled(),
            "efficient": switches.mem_efficient_sdp_enabled(),
            "cudnn": switches.cudnn_sdp_enabled(),
            "math": switches.math_sdp_enabled(),
        }
        allowed = {name for name, there in enabled.items() if there}
        if more.get("enable_gqa") and k.shape[-3] != q.shape[-3]:
            allowed.discard("efficient")  # it needs a key head for each query head
        kernel = overhead.choose(self.kind, dtype, q.shape[-1], masked, allowed)
        if kernel == "math":
            return ATTENTION(q, k, v, attn_mask, dropout_p, *given, **more)
        fused = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
        if masked:
            attn_mask = as_bias(attn_mask, q, k, padded=kernel == "efficient")
        # Flash takes no mask; the others' flag keeps the log-sum-exp, which backward needs.
        between = () if kernel == "flash" else (attn_mask, True)
        causal = bool(given[0] if given else more.get("is_causal", False))
        return fused(q, k, v, *between, dropout_p, causal)[0]


def drop(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Apply dropout by CUDA's kernel, which keeps a mask of one byte per element.
    Other kernels keep noise in the input's dtype. Source: torch 2.13,
    aten/src/ATen/native/Dropout.cpp (is_fused_kernel_acceptable)."""
    fused = training and 0 < p < 1 and not inplace and x.device.type == GPU
    return torch.native_dropout(x, p, True)[0] if fused else DROPOUT(x, p, training, inplace)


def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """Normalise by CUDA's kernel, which keeps ``x`` and a float32 number per row.
    Where the types of ``x`` and ``weight`` differ, torch computes the norm by its parts, here as
    there. Source: torch 2.13, aten/src/ATen/native/layer_norm.cpp (rms_norm_symint)."""
    parts = x.device.type != GPU or (weight is not None and weight.dtype is not x.dtype)
    if parts or torch.compiler.is_compiling():  # inductor takes the kernel apart again
        return RMS_NORM(x, shape, weight, eps)
    return RMSNorm.apply(x, list(shape), weight)


class RMSNorm(torch.autograd.Function):
    """CUDA's kernel of ``torch.nn.RMSNorm``: on ``meta`` torch has its backward only."""

    @staticmethod
    def forward(ctx: Any, x: Any, shape: list[int], weight: Any) -> Any:
        """Return the normed ``x``; a layer norm has the same outputs and a mean, which is freed."""
        out, _, deviation = torch.native_layer_norm(x, shape, weight, None, 0.0)
        ctx.save_for_backward(x, weight, deviation)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        """Return the gradients of ``x`` and ``weight``."""
        x, weight, deviation = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        of_x, of_weight = torch.ops.aten._fused_rms_norm_backward(
            gradient, x, ctx.shape, deviation, weight, wanted
        )
        return of_x, None, of_weight


def as_bias(mask: Any, q: Any, k: Any, *, padded: bool) -> Any:
    """Return the mask for the fused kernels: additive, in the queries' dtype, expanded to all
    heads.
    A boolean mask is converted first. If ``padded``, rows begin at multiples of 8. Source: torch
    2.13, aten/src/ATen/native/transformers/attention.cpp (convert_boolean_attn_mask_,
    aligned_tensor, pad_bias, preprocess_mask)."""
    if mask.dtype is torch.bool:
        never = torch.full((), float("-inf"), dtype=q.dtype, device=mask.device)
        mask = torch.where(mask, 0.0, never)
    if padded and any(stride % ALIGNED for stride in mask.stride()[:-1]):
        width = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, ALIGNED - width % ALIGNED))[..., :width]
    return mask.expand(*q.shape[:-2], q.shape[-2], k.shape[-2])


def _eligible(leaf: Any) -> bool:
    """Return True for a floating tensor on the GPU, except float64, which CUDA's autocast
    ignores."""
    is_tensor = isinstance(leaf, torch.Tensor) and device_of(leaf).type == GPU
    return is_tensor and leaf.is_floating_point() and leaf.dtype is not torch.float64


@contextlib.contextmanager
def cuda_like(kind: str) -> Iterator[CudaLike]:
    """Make this process treat tensors on ``meta`` as those of a GPU of that ``kind``."""
    mode = CudaLike(kind)
    with contextlib.ExitStack() as stack:
        for target, name, stand_in in _patches(mode._copies.clear):
            stack.enter_context(mock.patch.object(target, name, stand_in))
        stack.enter_context(stays_in_backward(mode))
        yield mode


def _patches(forget: Callable[[], None]) -> list[tuple[Any, str, Any]]:
    """Return the patches; ``forget`` clears the cached copies of weights when the outermost
    autocast ends: only backward keeps them."""
    from torch.optim import adam, adamw
    from torch.utils import checkpoint

    infer, fused = checkpoint._infer_device_type, adam._device_dtype_check_for_fused
    autocast = torch.autocast

    def init(self: Any, device_type: str, *given: Any, **more: Any) -> None:
        old_init(self, "cuda" if device_type == GPU else device_type, *given, **more)

    def leave(self: Any, *given: Any) -> Any:
        result = old_exit(self, *given)
        if not torch.is_autocast_enabled("cuda"):
            forget()
        return result

    old_init, old_exit = autocast.__init__, autocast.__exit__

    def device_type(*args: Any) -> str:
        inferred = infer(*args)
        return "cuda" if inferred == GPU else inferred

    def check(p: Any, cuda_unsupported: bool = False) -> None:
        if p.device.type != GPU:
            fused(p, cuda_unsupported)

    patches = [
        (autocast, "__init__", init),
        (autocast, "__exit__", leave),
        # Autocast disables itself without a GPU.
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (torch.cuda, "is_bf16_supported", lambda *given, **more: True),
        # Recomputation enters autocast again by the type of its inputs' device.
        (checkpoint, "_infer_device_type", device_type),
    ]
    return patches + [(m, "_device_dtype_check_for_fused", check) for m in (adam, adamw) if
                    hasattr(m, "_device_dtype_check_for_fused")]  # fmt: skip
