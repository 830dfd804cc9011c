"""qwZ: weights are rounded to 8 bits on their way to the other ranks, blocks of them with a scale
each, and turned back where they are gathered. What each rank keeps is not rounded.

Source: Wang et al. 2023, ZeRO++ (arXiv:2306.10209); DeepSpeed's kernels are CUDA's (0.19,
partition_parameters.py, ``CUDAQuantizer``), and no GPU has run them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from strategies.base import demand

if TYPE_CHECKING:
    from strategies.engine import Launch, Trained

__all__ = ["MULTIPLE", "OP", "evidence", "quantised", "refusal"]

KEY = "zero_quantized_weights"
OP = "quantizer"
"""DeepSpeed's compiled kernels, as ``harness.system.probe`` names them."""
MULTIPLE = 8
"""Elements that the kernels take together."""
GATHER = "allgather_base_"


def quantised(zero: Mapping[str, Any]) -> bool:
    """Whether a zero_optimization block gathers weights in 8 bits."""
    return bool(zero.get(KEY))


def refusal(zero: Mapping[str, Any], launch: Launch) -> str | None:
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


def evidence(trained: Trained) -> dict[str, Any]:
    """In which type weights were gathered in the watched step, and what their scales took.

    Raises:
        NotInForce: they travelled in another type than was asked for.
    """
    if trained.engine.stage < 3 or not trained.observed.ran or trained.launch.processes == 1:
        return {}
    sent = [s for s in trained.observed.sent if s.collective.strip("_") == GATHER.strip("_")]
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
