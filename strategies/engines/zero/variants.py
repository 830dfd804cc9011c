"""Twin-Flow: some pieces of the optimizer lie in host memory and are stepped there by DeepSpeed's
CPU Adam, the others on the device, by torch's AdamW (DeepSpeed's ``backup_optimizer``).

DeepSpeed 0.19.8 deals whole pieces (``sub_group_size``), the first ones to the device; it tells the
two by the names of devices, and its checkpoints leave the second optimizer's state out.

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

    from strategies.engine import RunContext, TrainingRun


REMARK = (
    "host and device are one memory here: what would be the device's share is stepped by torch's "
    "AdamW on the CPU"
)
STATE = "device_share_{}.pt"
SAMPLE = 4096


def name_device(here: bool) -> None:
    """On a CPU DeepSpeed would take the device's pieces for the host's, whose name is the same:
    while ``here``, they are on a CPU that has a number."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator()._name = "cpu:0" if here else "cpu"


def hosted(trained: TrainingRun) -> list[torch.Tensor]:
    """The pieces whose float32 weights are in host memory: of an optimizer that is offloaded, all
    but those that DeepSpeed dealt to the device."""
    optimizer = trained.model.optimizer
    dealt = getattr(optimizer, "subgroup_to_device", {})
    pieces = enumerate(trained.optimized())
    return [piece for index, piece in pieces if dealt.get(index, "cpu") == "cpu"]


def states(trained: TrainingRun) -> Mapping[Any, Any]:
    """What the device's optimizer keeps, by piece."""
    other = getattr(trained.model.optimizer, "backup_optimizer", None)
    return other.state if other is not None else {}


def state_of(trained: TrainingRun, piece: torch.Tensor) -> Mapping[str, Any]:
    """What either optimizer keeps of ``piece``."""
    return trained.inner_optimizer.state.get(piece) or states(trained).get(piece, {})


@contextlib.contextmanager
def watched(trained: TrainingRun, stepped: list[tuple[int, bool]]) -> Iterator[None]:
    """While it lasts, ``stepped`` gets the elements of each piece that the device's optimizer
    stepped, and whether they moved."""
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
    """How much of the optimizer lies on the host, and that torch's AdamW stepped all the rest.

    Raises:
        NotInForce: another share, or a piece that was not stepped.
    """
    wanted, pieces = config.ratio(trained.engine.zero), trained.optimized()
    elements = sum(piece.numel() for piece in pieces)
    host = sum(piece.numel() for piece in hosted(trained))
    done = sum(numel for numel, _ in stepped)
    if wanted == 1:
        demand(done == 0, f"AdamW stepped {done} elements on the device, all were to be offloaded")
        return {}
    demand(done == elements - host, f"AdamW stepped {done} elements of the {elements - host}")
    demand(all(moved for _, moved in stepped), "AdamW stepped pieces of the device that stayed")
    # Whole pieces are dealt, and the number of them is rounded down.
    off = 2 * max(piece.numel() for piece in pieces) / elements
    told = f"{host} of {elements} elements of the optimizer are on the host, {wanted:g} were asked"
    demand(0 < host < elements and abs(host / elements - wanted) <= off, told)
    return {"host_share": round(host / elements, 4), "stepped_on_device": done}


def save(trained: TrainingRun, path: Path) -> None:
    """Beside DeepSpeed's checkpoint, this rank's state of the device's optimizer."""
    import torch

    kept = [dict(states(trained).get(piece, {})) for piece in trained.optimized()]
    torch.save(kept, path / STATE.format(trained.accelerator.process_index))


def load(trained: TrainingRun, path: Path) -> None:
    """Read what ``save`` wrote."""
    import torch

    other = trained.model.optimizer.backup_optimizer
    kept = torch.load(path / STATE.format(trained.accelerator.process_index), weights_only=True)
    for piece, state in zip(trained.optimized(), kept, strict=True):
        if state:
            moved = {n: v if n == "step" else v.to(piece.device) for n, v in state.items()}
            other.state[piece] = moved


# ---- secondary ----
# hpZ: from its forward on, each group of ranks has all weights between its members once more, so
# that backward gathers them among these alone. Watched in a step: DeepSpeed drops the second share
# when the optimizer has stepped.
#
# Source: Wang et al. 2023, ZeRO++ (arXiv:2306.10209); attributes are DeepSpeed's own (0.19).


GATHER = "_allgather_base_"
PADDING = 0.02


def forget_group() -> None:
    """DeepSpeed keeps the group of one training for the process, and refuses a second."""
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def kept(parameters: list[Any]) -> list[torch.Tensor]:
    """The second shares that are there now."""
    found = (getattr(p, "ds_secondary_tensor", None) for p in parameters)
    return [tensor for tensor in found if tensor is not None]


def makers() -> Iterator[AllocationScope]:
    """The second share is a part of the weights, not something gathered."""
    from deepspeed.runtime.zero.partition_parameters import Init

    yield AllocationScope(Init, "_partition_param_sec", "parameters")


def secondary_evidence(trained: TrainingRun, most: int) -> dict[str, Any]:
    """``most``: elements of second shares that were there at once in the watched step. What
    backward gathered went among a group; of what trains, forward's went among all, for DeepSpeed
    leaves the second share of frozen weights alone.

    Raises:
        NotInForce: there is a second share that was not asked for, none, or one of another size.
    """
    size, ranks = config.group(trained.engine.zero), trained.launch.processes
    if size == 1:
        demand(most == 0, f"a second share of {most} elements was kept, and none was asked for")
        return {}
    cut = [p for p in trained.module.parameters() if not p.ds_persist]
    share = most / sum(p.ds_numel for p in cut)
    demand(
        abs(share - 1 / size) <= PADDING,
        f"this rank kept {share:.3f} of the weights for backward, {1 / size:.3f} were expected",
    )
    facts = {"second_share": round(share, 4), "ranks_that_share_again": size}
    if not trained.observed.ran:  # compiled blocks are not watched
        return facts
    among = {p: _among(trained, p) for p in ("forward", "backward")}
    told = f"weights were gathered among {among['backward']} ranks in backward"
    demand(among["backward"] == [size], f"{told}, not {size}")
    wanted = {ranks} if any(p.requires_grad for p in cut) else set()
    demand(
        wanted <= set(among["forward"]), f"{told} and {among['forward']} in forward, not {ranks}"
    )
    return facts | {"backward_gathered_among": size}


def _among(trained: TrainingRun, phase: str) -> list[int]:
    """Sizes of the groups of ranks among which weights were gathered."""
    from torch.distributed import distributed_c10d as c10d

    seen = trained.observed.sent
    names = {s.group for s in seen if s.collective == GATHER and s.phase == phase}
    found = (c10d._resolve_process_group(name) for name in names)
    return sorted({len(c10d.get_process_group_ranks(group)) for group in found})


# ---- quantised ----
# qwZ: weights are rounded to 8 bits on their way to the other ranks, blocks of them with a scale
# each, and turned back where they are gathered. What each rank keeps is not rounded.
#
# Source: Wang et al. 2023, ZeRO++ (arXiv:2306.10209); DeepSpeed's kernels are CUDA's (0.19,
# partition_parameters.py, ``CUDAQuantizer``), and no GPU has run them here.


KEY = "zero_quantized_weights"
OP = "quantizer"
"""DeepSpeed's compiled kernels, as ``harness.system.probe`` names them."""
MULTIPLE = 8
"""Elements that the kernels take together."""
QUANTISED_GATHER = "allgather_base_"


def quantised(zero: Mapping[str, Any]) -> bool:
    """Whether a zero_optimization block gathers weights in 8 bits."""
    return bool(zero.get(KEY))


def refusal(zero: Mapping[str, Any], launch: RunContext) -> str | None:
    """Why weights cannot travel so, and the way out: alone nothing travels, and a rank's share of
    each weight must be a number that the kernels take (DeepSpeed asserts it in the first step)."""
    if not quantised(zero):
        return None
    ranks = launch.processes
    if ranks == 1:
        return "one process gathers nothing; take zero3, or more processes"
    shares = {-(-size // ranks): size for size in launch.subject.sizes.weights}
    odd = next((share for share in shares if share % MULTIPLE), None)
    if odd is None:
        return None
    return (
        f"a rank's share of a weight of {shares[odd]} elements is {odd}, and DeepSpeed quantises "
        f"multiples of {MULTIPLE}; take another number of processes, or zero3_hpz"
    )


def quantised_evidence(trained: TrainingRun) -> dict[str, Any]:
    """In which type weights were gathered in the watched step, and what their scales took.

    Raises:
        NotInForce: they travelled in another type than was asked for.
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
    told = f"weights were gathered as {sorted(of_type) or 'nothing'}"
    if not quantised(trained.engine.zero):
        demand(eight == 0, f"{eight} bytes of weights were gathered in 8 bits, unasked for")
        return {}
    demand(eight > 0, f"{told}, not int8")
    others, scales = set(of_type) - {"float32"}, of_type.get("float32", 0)
    demand(not others, f"{told} beside int8")
    demand(scales < eight, f"{scales} bytes of scales beside {eight} bytes of weights")
    return {"weights_gathered_as": "int8", "gathered_bytes": eight, "scale_bytes": scales}
