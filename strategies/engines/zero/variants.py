"""ZeRO variants: partial optimizer offload (Twin-Flow), hpZ and qwZ.

Twin-Flow keeps some pieces of the optimizer in host memory, where DeepSpeed's CPU Adam steps them.
The others are on the device, where torch's AdamW steps them (DeepSpeed's ``backup_optimizer``).
DeepSpeed 0.19.8 places whole pieces (``sub_group_size``), the first ones on the device. It
distinguishes the two by device names, and its checkpoints omit the second optimizer's state.

Source: ZeRO-Offload++, deepspeed.ai (blogs/deepspeed-offloadpp); attributes are DeepSpeed's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.base import demand
from strategies.engine import TrainingRun
from strategies.engines.zero import config
from strategies.inventory import AllocationScope

if TYPE_CHECKING:
    import torch

    from strategies.engine import RunContext


REMARK = "host and device share one memory here: torch's AdamW steps the device's share on the CPU"
STATE = "device_share_{}.pt"
SAMPLE = 4096


def name_device(here: bool) -> None:
    """Name the CPU "cpu:0" if ``here``, so that DeepSpeed can tell device pieces from host pieces.

    On a CPU both would have the name "cpu".
    """
    from deepspeed.accelerator import get_accelerator

    get_accelerator()._name = "cpu:0" if here else "cpu"


def hosted(trained: TrainingRun) -> list[torch.Tensor]:
    """Return the pieces of an offloaded optimizer whose float32 weights are in host memory.

    All except those that DeepSpeed placed on the device.
    """
    optimizer = trained.model.optimizer
    dealt = getattr(optimizer, "subgroup_to_device", {})
    pieces = enumerate(trained.optimized())
    return [piece for index, piece in pieces if dealt.get(index, "cpu") == "cpu"]


def states(trained: TrainingRun) -> Mapping[Any, Any]:
    """Return the state of the device's optimizer, by piece."""
    other = getattr(trained.model.optimizer, "backup_optimizer", None)
    return other.state if other is not None else {}


def state_of(trained: TrainingRun, piece: torch.Tensor) -> Mapping[str, Any]:
    """Return the state of ``piece`` in either optimizer."""
    return trained.inner_optimizer.state.get(piece) or states(trained).get(piece, {})


@contextlib.contextmanager
def watched(trained: TrainingRun, stepped: list[tuple[int, bool]]) -> Iterator[None]:
    """Record in ``stepped`` the elements of each piece that the device's optimizer steps, and
    whether they changed."""
    other = getattr(trained.model.optimizer, "backup_optimizer", None)
    if other is None:
        yield
        return
    before: list[Any] = []

    def begin(optimizer: Any, *_: Any) -> None:
        before[:] = [(p, p.detach()[:SAMPLE].clone()) for p in _stepped(optimizer)]

    def end(*_: Any) -> None:
        stepped.extend((p.numel(), not was.equal(p.detach()[:SAMPLE])) for p, was in before)

    handles = [other.register_step_pre_hook(begin), other.register_step_post_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _stepped(optimizer: Any) -> list[Any]:
    return [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]


def evidence(trained: TrainingRun, stepped: list[tuple[int, bool]]) -> dict[str, Any]:
    """Return the host's share of the optimizer, and check that torch's AdamW stepped the rest.

    Raises:
        NotInForce: another share, or a piece that was not stepped.
    """
    wanted, pieces = config.ratio(trained.engine.zero), trained.optimized()
    elements = sum(piece.numel() for piece in pieces)
    host = sum(piece.numel() for piece in hosted(trained))
    done = sum(numel for numel, _ in stepped)
    if wanted == 1:
        demand(done == 0, f"AdamW stepped {done} elements on the device, expected none")
        return {}
    demand(
        done == elements - host,
        f"AdamW stepped {done} elements on the device, expected {elements - host}",
    )
    demand(
        all(moved for _, moved in stepped),
        "AdamW ran on the device, and some pieces did not change",
    )
    # DeepSpeed places whole pieces, and rounds their number down.
    off = 2 * max(piece.numel() for piece in pieces) / elements
    text = f"{host} of {elements} optimizer elements are in host memory, expected {wanted:g} of all"
    demand(0 < host < elements and abs(host / elements - wanted) <= off, text)
    return {"host_share": round(host / elements, 4), "stepped_on_device": done}


def save(trained: TrainingRun, path: Path) -> None:
    """Save this rank's state of the device's optimizer next to DeepSpeed's checkpoint."""
    import torch

    kept = [dict(states(trained).get(piece, {})) for piece in trained.optimized()]
    torch.save(kept, path / STATE.format(trained.accelerator.process_index))


def load(trained: TrainingRun, path: Path) -> None:
    """Load a state of ``save``."""
    import torch

    other = trained.model.optimizer.backup_optimizer
    kept = torch.load(path / STATE.format(trained.accelerator.process_index), weights_only=True)
    for piece, state in zip(trained.optimized(), kept, strict=True):
        if state:
            moved = {n: v if n == "step" else v.to(piece.device) for n, v in state.items()}
            other.state[piece] = moved


# ---- hpZ: a second copy of the weights ----
# After its forward each group of ranks holds a second copy of all weights, and backward gathers
# only within the group. DeepSpeed drops the copy when the optimizer has stepped, so it is watched
# in a step. Source: Wang et al. 2023, ZeRO++ (arXiv:2306.10209); attributes are DeepSpeed's own
# (0.19).


GATHER = "_allgather_base_"
PADDING = 0.02


def forget_group() -> None:
    """Clear DeepSpeed's per-process group; it refuses a second training otherwise."""
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def kept(parameters: list[Any]) -> list[torch.Tensor]:
    """Return the second shares that exist now."""
    found = (getattr(p, "ds_secondary_tensor", None) for p in parameters)
    return [tensor for tensor in found if tensor is not None]


def makers() -> Iterator[AllocationScope]:
    """Yield the method that allocates second shares, which count as weights, not as gathered."""
    from deepspeed.runtime.zero.partition_parameters import Init

    yield AllocationScope(Init, "_partition_param_sec", "parameters")


def secondary_evidence(trained: TrainingRun, most: int) -> dict[str, Any]:
    """Check the second share; ``most`` is its largest number of elements in the watched step.

    Backward gathers within a group. Forward gathers trained weights among all ranks; DeepSpeed
    leaves the second share of frozen weights in place.

    Raises:
        NotInForce: an unrequested second share, none, or one of another size.
    """
    size, ranks = config.group(trained.engine.zero), trained.launch.processes
    if size == 1:
        demand(most == 0, f"a secondary shard of {most} elements was kept, expected none")
        return {}
    cut = [p for p in trained.module.parameters() if not p.ds_persist]
    share = most / sum(p.ds_numel for p in cut)
    demand(
        abs(share - 1 / size) <= PADDING,
        f"this rank kept {share:.3f} of the weights for backward, expected {1 / size:.3f}",
    )
    facts = {"second_share": round(share, 4), "ranks_that_share_again": size}
    if not trained.observed.ran:  # compiled blocks are not watched
        return facts
    among = {p: _among(trained, p) for p in ("forward", "backward")}
    text = f"weights were gathered among {among['backward']} ranks in backward"
    demand(among["backward"] == [size], f"{text}, expected {size}")
    wanted = {ranks} if any(p.requires_grad for p in cut) else set()
    demand(
        wanted <= set(among["forward"]),
        f"{text} and {among['forward']} in forward, expected {ranks}",
    )
    return facts | {"backward_gathered_among": size}


def _among(trained: TrainingRun, phase: str) -> list[int]:
    """Return the sizes of the groups of ranks in which weights were gathered."""
    from torch.distributed import distributed_c10d as c10d

    seen = trained.observed.sent
    names = {s.group for s in seen if s.collective == GATHER and s.phase == phase}
    found = (c10d._resolve_process_group(name) for name in names)
    return sorted({len(c10d.get_process_group_ranks(group)) for group in found})


# ---- qwZ: quantized gathers ----
# Weights are quantized to 8 bits, with a scale per block, when they are sent, and decoded after the
# gather. Each rank's own share is not rounded. Source: Wang et al. 2023, ZeRO++ (arXiv:2306.10209).
# DeepSpeed's kernels need CUDA (0.19, partition_parameters.py, ``CUDAQuantizer``); no GPU has run
# them here.


KEY = "zero_quantized_weights"
OP = "quantizer"
"""DeepSpeed's compiled kernels, by their name in ``harness.system.probe``."""
MULTIPLE = 8
"""Number of elements that the kernels process together."""
QUANTISED_GATHER = "allgather_base_"


def quantised(zero: Mapping[str, Any]) -> bool:
    """Return whether a zero_optimization block gathers weights in 8 bits."""
    return bool(zero.get(KEY))


def refusal(zero: Mapping[str, Any], launch: RunContext) -> str | None:
    """Return why weights cannot be gathered in 8 bits, and the remedy; None if they can.

    One process gathers nothing. A rank's share of each weight must be a multiple of ``MULTIPLE``
    (DeepSpeed asserts it in the first step).
    """
    if not quantised(zero):
        return None
    ranks = launch.processes
    if ranks == 1:
        return "one process gathers nothing; take zero3, or more processes"
    if launch.subject.sizes is None:
        return "the sizes of the weights are not known; take zero3, or zero3_hpz"
    shares = {-(-size // ranks): size for size in launch.subject.sizes.weights}
    odd = next((share for share in shares if share % MULTIPLE), None)
    if odd is None:
        return None
    return (
        f"a rank's share of a weight of {shares[odd]} elements is {odd}, and DeepSpeed quantises "
        f"multiples of {MULTIPLE}; take another number of processes, or zero3_hpz"
    )


def quantised_evidence(trained: TrainingRun) -> dict[str, Any]:
    """Return the type in which weights were gathered in the watched step, and the bytes of their
    scales.

    Raises:
        NotInForce: they were gathered in another type than requested.
    """
    if trained.engine.stage < 3 or not trained.observed.ran or trained.launch.processes == 1:
        return {}
    sent = [
        s for s in trained.observed.sent if s.collective.strip("_") == QUANTISED_GATHER.strip("_")
    ]
    of_type: dict[str, int] = {}
    for one in sent:
        if one.phase in ("forward", "backward"):
            of_type[one.dtype] = of_type.get(one.dtype, 0) + one.bytes
    eight = of_type.pop("int8", 0)
    text = f"weights were gathered as {sorted(of_type) or 'nothing'}"
    if not quantised(trained.engine.zero):
        demand(eight == 0, f"{eight} bytes of weights were gathered in 8 bits, expected none")
        return {}
    demand(eight > 0, f"{text}, expected int8")
    others, scales = set(of_type) - {"float32"}, of_type.get("float32", 0)
    demand(not others, f"{text} besides int8")
    demand(scales < eight, f"{scales} bytes of scales for {eight} bytes of weights")
    return {"weights_gathered_as": "int8", "gathered_bytes": eight, "scale_bytes": scales}
