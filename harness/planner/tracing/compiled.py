"""Trace of compiled regions: torch.compile's own graphs, partition and memory plan, without code.

AOTAutograd captures a region's joint graph, the min-cut partitioner splits it, and inductor lowers
both halves as it does on a CPU. The traced step then runs inductor's wrappers: they allocate, reuse
and free tensors without storage. Only kernels are missing; no C++ compiler runs.

Dynamo is not used. Its place is taken by the region's Python function with the weights as inputs,
so a graph break is not seen.

With ``mode=reduce-overhead`` each graph runs as a replay of a CUDA graph. It allocates from the
graphs' own pool and copies inputs that may move into it. The host issues one operation for it.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from harness.planner import overhead
from harness.planner.adapters import adapter_of
from harness.planner.overhead import NoTrace
from harness.planner.tracing import cuda_calls, side_streams
from harness.planner.tracing.trace import Counter, StoragelessTracer
from harness.planner.tracing.world import GPU
from harness.resolve import Resolved
from strategies.activations.compile import Compile, CountingBackend
from strategies.engine import RunContext

TENSOR = object()
"""Mark of a tensor's place among a call's arguments."""
SCALARS = (bool, int, float, str, type(None))
RNG_STATE = 16
"""Bytes of a CUDA generator's saved state, in host memory."""
LOWERED = {
    "force_disable_caches": True,  # a cached graph has no module to patch
    "size_asserts": False,
    "alignment_asserts": False,
    "compile_threads": 1,
}
"""Inductor's settings here. None changes a buffer."""


def refusal(resolved: Resolved) -> str | None:
    """Return why a recipe with compiled graphs has no prediction; None if it has one."""
    parts = [one for one in resolved.recipe.strategies if "compiled" in one.traits()]
    other = next((one for one in parts if not isinstance(one, Compile)), None)
    if other is not None:
        return f"{other} has compiled kernels of its own, which are not traced"
    (part,) = parts
    if part.backend != "inductor":
        return f"only inductor's graphs are traced; leave backend={part.backend} out"
    if part.records and resolved.spec.device != "cuda":
        return f"a CPU records no CUDA graphs; leave mode={part.mode} out"
    if part.scope == "model":
        return "a whole model may break into several graphs; leave scope=model out"
    if "moves_activations" in resolved.launch.traits:
        return "activations that offload_activations moves are not traced beside compiled graphs"
    return _between_ranks(resolved.launch)


def _between_ranks(launch: RunContext) -> str | None:
    """Return why ranks make a block's graph another one than that of a single process."""
    if launch.layout.tensor > 1 or launch.layout.sequence > 1:
        return "compiled blocks with collectives inside are not traced; leave tp and sp out"
    return adapter_of(launch.engine).graph_refusal(launch)


@contextlib.contextmanager
def regions(
    tracer: StoragelessTracer,
    fake: FakeTensorMode,
    device: str,
    limit: int | None = None,
    pool: GraphPool | None = None,
) -> Iterator[None]:
    """Trace what the strategy ``compile`` compiles; ``device`` is the traced one's type.

    ``limit``: bytes of trained weights from which a graph is not traced, because the engine splits
    it (``TraceAdapter.graph_bytes``). ``pool``: that of CUDA graphs, if they are recorded.
    """
    from torch._inductor.codecache import PyCodeCache

    plain, graphs = torch.compile, Graphs(tracer, fake, device, limit, pool)
    _register()
    PyCodeCache.cache_clear()  # wrappers of an earlier trace in this process belong to its tracer

    def compiled(model: Any = None, *, backend: Any = "inductor", **more: Any) -> Any:
        if not isinstance(backend, CountingBackend):
            return plain(model, backend=backend, **more)
        return functools.partial(_call, graphs, model)

    with mock.patch.object(torch, "compile", compiled):
        yield


def _call(graphs: Graphs, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a compiled function. A module's own hooks run outside of its graph."""
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, nn.Module):
        return graphs.run(function, [], args, kwargs)
    forward = owner.forward

    def run(*given: Any, **named: Any) -> Any:
        return graphs.run(forward, [owner], given, named)

    with mock.patch.object(owner, "forward", run):
        return function(*args, **kwargs)


class Call:
    """One call of a region.

    ``weights`` are the tensors of the ``modules``, each once. ``blocks`` are the modules among its
    arguments.
    """

    def __init__(self, function: Any, modules: list[nn.Module], args: Any, kwargs: Any) -> None:
        leaves, self.spec = tree_flatten((args, kwargs))
        self.function = function
        self.blocks = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
        self.modules = modules + self.blocks
        self.named = [dict(_tensors(module)) for module in self.modules]
        found = {id(t): t for tensors in self.named for t in tensors.values()}
        self.weights = list(found.values())
        self.given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.plain = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def key(self) -> tuple[Any, ...]:
        """Return the key of the call's graph: equal keys compile to the same graph."""
        told = ("module" if isinstance(one, nn.Module) else one for one in self.plain)
        autocast = [torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu")]
        return (
            *(_settings(module) for module in self.modules),
            *map(_layout, (*self.weights, *self.given)),
            *(*told, str(self.spec), torch.is_grad_enabled(), *autocast),
        )

    def flat(self) -> tuple[Callable[..., tuple[Any, ...]], list[Any]]:
        """Return the region as a function of its weights and inputs, and a list for its output's
        structure.

        The function keeps none of the call's tensors.
        """
        place = {id(tensor): at for at, tensor in enumerate(self.weights)}
        places = [{name: place[id(t)] for name, t in tensors.items()} for tensors in self.named]
        function, modules, plain, spec = self.function, self.modules, self.plain, self.spec
        count, structure = len(self.weights), []

        def run(*values: Any) -> tuple[Any, ...]:
            given = iter(values[count:])
            leaves = [next(given) if one is TENSOR else one for one in plain]
            args, kwargs = tree_unflatten(leaves, spec)
            with contextlib.ExitStack() as stack:
                for module, names in zip(modules, places, strict=True):
                    swapped = {name: values[at] for name, at in names.items()}
                    swap = nn.utils.stateless._reparametrize_module(module, swapped)
                    stack.enter_context(swap)
                out, made = tree_flatten(function(*args, **kwargs))
            structure[:] = [made]
            return tuple(out)

        return run, structure


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _settings(module: nn.Module) -> str:
    """Return everything but tensors that a module's forward pass may depend on."""
    plain = [
        sorted((k, v) for k, v in vars(part).items() if isinstance(v, SCALARS))
        for part in module.modules()
    ]
    return f"{module} {plain}"


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


class Graphs:
    """Compiled graphs of one trace, each compiled at its first call."""

    def __init__(
        self,
        tracer: StoragelessTracer,
        fake: FakeTensorMode,
        device: str,
        limit: int | None,
        pool: GraphPool | None,
    ) -> None:
        self.tracer, self.fake, self.device, self.limit = tracer, fake, device, limit
        self.pool = pool
        self._known: dict[tuple[Any, ...], tuple[Callable[..., Any], Any]] = {}

    def run(self, function: Any, modules: list[nn.Module], args: Any, kwargs: Any) -> Any:
        """Run the call's graphs; compile them first if they are new.

        The hooks of blocks that the graph calls run around it. They mark where blocks begin in the
        trace.
        """
        call = Call(function, modules, args, kwargs)
        called = [] if hasattr(function, "beneath_hooks") else call.blocks
        key = call.key()
        if key not in self._known:
            self._known[key] = self._compile(call)
        graph, structure = self._known[key]
        for block in called:
            for hook in [*block._forward_pre_hooks.values()]:
                hook(block, ())
        out = tree_unflatten(graph(*call.weights, *call.given), structure)
        for block in called:
            for hook in [*block._forward_hooks.values()]:
                hook(block, (), out)
        return out

    def _compile(self, call: Call) -> tuple[Callable[..., Any], Any]:
        """Return the call's graphs as a function of weights and inputs, and the output's structure.

        They are captured on a CPU, because inductor has no lowering for the traced GPU's device.
        """
        from torch._inductor.compile_fx import compile_fx

        self._check(call)
        run, structure = call.flat()
        with self._capturing(), _without_hooks(call.blocks), self.fake:
            inputs = [_on_cpu(tensor) for tensor in (*call.weights, *call.given)]
            with torch.no_grad():
                outputs = len(run(*inputs))
            graph = _graph(run, len(call.weights), len(inputs), outputs)
            return compile_fx(graph, inputs), structure[0]

    def _check(self, call: Call) -> None:
        """Refuse a graph that the engine splits.

        Raises:
            NoTrace: the trained weights reach the limit.
        """
        trained = sum(weight.nbytes for weight in call.weights if weight.requires_grad)
        if self.limit is not None and trained >= self.limit:
            size = f"{trained / 2**20:.1f} MiB of trained weights"
            raise NoTrace(
                f"DDP splits the graph of a compiled block with {size}; take zero1, zero2 or single"
            )

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        """Lower graphs without a trace of it, and without kernels."""
        from torch._functorch import config as functorch
        from torch._inductor import config as inductor
        from torch._inductor import cpu_vec_isa
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
        from torch._inductor.output_code import CompiledFxGraph
        from torch.utils import checkpoint

        guards, inside = torch._C._dynamo.guards, "cpu" if self.device == GPU else GPU
        patches = (
            (torch.compiler, "_is_compiling_flag", True),
            (cuda_calls, "GPU", inside),
            (guards, "_empty_strided_cpu", functools.partial(_empty, self.device)),
            (guards, "_reinterpret_tensor", _view),
            # Finding vector instructions would run a C++ compiler.
            (cpu_vec_isa, "pick_vec_isa", lambda: cpu_vec_isa.invalid_vec_isa),
            (AsyncCompile, "cpp_pybinding", lambda *_, **__: self._kernel),
            (checkpoint, "checkpoint", functools.partial(_tagged, checkpoint.checkpoint)),
            (CompiledFxGraph, "post_compile", self._recorded(CompiledFxGraph.post_compile)),
        )
        # A graph without its backward would be lowered during backward, beyond these patches.
        at_once = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
        with contextlib.ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(inductor.patch(LOWERED))
            stack.enter_context(functorch.patch(at_once))
            # C++ has no type for the scales of MX; no kernel is compiled, so any name will do.
            stack.enter_context(mock.patch.dict(DTYPE_TO_CPP, {torch.float8_e8m0fnu: "uint8_t"}))
            for owner, name, value in patches:
                stack.enter_context(mock.patch.object(owner, name, value))
            yield

    def _recorded(self, finish: Callable[..., None]) -> Callable[..., None]:
        """Return ``finish``, which makes a graph callable, with the graph run from the pool."""

        def finished(graph: Any, inputs: Any, constants: Any, options: Any) -> None:
            finish(graph, inputs, constants, options)
            if self.pool is not None:
                static = frozenset(options["static_input_idxs"])
                graph.current_callable = functools.partial(
                    self.pool.run, graph.current_callable, static
                )

        return finished

    def _kernel(self, *given: Any) -> None:
        """Count the bytes of a fused kernel instead of running it."""
        tensors = {id(one): one for one in given if isinstance(one, torch.Tensor)}.values()
        size = sum(one.numel() * one.element_size() for one in tensors)
        self.tracer.work(self.tracer.phase, "memory", size)


class GraphPool:
    """Memory pool of recorded CUDA graphs, and the operations that their replays save the host.

    All graphs share one pool, apart from the pools of other allocations. Inputs at addresses that
    may change are copied into it, by one operation; weights and outputs of other graphs are not.
    A graph's recording allocates cuBLAS's workspace from it and frees that at the end. Source:
    torch 2.13, torch/_inductor/cudagraph_trees.py (_allocate_and_copy_recording_inputs,
    clear_cublas_manager).
    """

    def __init__(self, tracer: StoragelessTracer, counter: Counter, kind: str) -> None:
        self.tracer, self.counter = tracer, counter
        self.stream = side_streams.Stream()
        self.workspace = overhead.workspace(kind == "cudnn")

    def run(self, graph: Callable[..., Any], static: frozenset[int], inputs: list[Any]) -> Any:
        """Run a compiled graph as a replay of its recording; ``static`` inputs stay in place."""
        with side_streams.inside(self.stream):
            moved = [
                at
                for at, one in enumerate(inputs)
                if isinstance(one, torch.Tensor) and at not in static and not self._holds(one)
            ]
            given = self._copied(inputs, moved)
            inputs.clear()
            free = self.tracer.hold("device", self.workspace, "cuBLAS's workspace", "temporaries")
            with self.counter.replaying(self.tracer.phase):
                out = graph(given)
            free()
        return out

    def _holds(self, tensor: torch.Tensor) -> bool:
        return self.tracer.stream_of(tensor) == self.stream.number

    @staticmethod
    def _copied(inputs: Sequence[Any], moved: Sequence[int]) -> list[Any]:
        """Return the inputs with those at ``moved`` copied."""
        given, olds = list(inputs), [inputs[at] for at in moved]
        with torch.no_grad():
            news = [
                torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device)
                for old in olds
            ]
            if olds:
                torch._foreach_copy_(news, olds)
        for at, new in zip(moved, news, strict=True):
            given[at] = new
        return given


def graph_pool(
    resolved: Resolved, tracer: StoragelessTracer, counter: Counter, kind: str
) -> GraphPool | None:
    """Return the pool of the row's CUDA graphs on a card of ``kind``; None if it records none."""
    parts = [one for one in resolved.recipe.strategies if isinstance(one, Compile)]
    records = any(part.records for part in parts)
    return GraphPool(tracer, counter, kind) if records else None


@contextlib.contextmanager
def _without_hooks(blocks: Sequence[nn.Module]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for block in blocks:
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                stack.enter_context(mock.patch.object(block, name, OrderedDict()))
        yield


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like ``tensor`` on a CPU; compiled graphs keep their example inputs alive."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def _graph(
    run: Callable[..., Any], weights: int, inputs: int, outputs: int
) -> torch.fx.GraphModule:
    """Return a graph that calls ``run``, with the marks that Dynamo leaves.

    The first ``weights`` inputs are static, so that the partitioner keeps them for free. Source:
    torch 2.13, torch/_functorch/_aot_autograd/frontend_utils.py (_try_get_metadata_from_dynamo).
    """
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"input_{at}") for at in range(inputs)]
    for at, node in enumerate(nodes):
        node._dynamo_source = None  # type: ignore[attr-defined]
        if at < weights:
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    called = graph.call_function(run, tuple(nodes))
    parts = [graph.call_function(operator.getitem, (called, at)) for at in range(outputs)]
    graph.output(tuple(parts))
    made = torch.fx.GraphModule(nn.Module(), graph)
    made.meta["dynamo_compile_id"] = "traced"
    made._param_name_to_source = {}  # type: ignore[assignment]
    return made


def _empty(
    device: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _view(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0
) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _tagged(
    checkpoint: Callable[..., Any],
    function: Callable[..., Any],
    *args: Any,
    context_fn: Any = None,
    use_reentrant: bool = False,
    preserve_rng_state: bool = False,
    **more: Any,
) -> Any:
    """Run ``checkpoint`` as Dynamo does: its operations are tagged for the partitioner.

    Source: torch 2.13, torch/_higher_order_ops/wrap.py (tag_activation_checkpoint_impl).
    """
    from torch._higher_order_ops import wrap
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    again = functools.partial(create_selective_checkpoint_contexts, wrap._always_prefer_recompute)
    number = next(wrap.uid)

    def contexts() -> Any:
        forward, backward = (context_fn or again)()
        forward.ac_graph_id = number
        return forward, backward

    more |= {"use_reentrant": False, "preserve_rng_state": False, "early_stop": False}
    with torch.fx.traceback.preserve_node_meta():
        return checkpoint(function, *args, context_fn=contexts, **more)


# ---- Random state ----
# Recomputed operations that draw random numbers run under their saved generator state.


def _save(mode: StoragelessTracer, op: Any, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return torch.empty(RNG_STATE, dtype=torch.uint8), op(*args, **kwargs)


def _use(mode: StoragelessTracer, state: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return op(*args, **kwargs)


@functools.cache
def _register() -> None:
    from torch._prims import rng_prims

    rng_prims.run_and_save_rng_state.py_impl(StoragelessTracer)(_save)
    rng_prims.run_with_rng_state.py_impl(StoragelessTracer)(_use)
    # torch 2.13 has no kernel without storage of a float8 product into a given tensor.
    PRODUCTS.impl("_scaled_mm.out", _scaled_into, "Meta")


PRODUCTS = torch.library.Library("aten", "IMPL")


def _scaled_into(*given: Any, out: torch.Tensor, **named: Any) -> torch.Tensor:
    return out
