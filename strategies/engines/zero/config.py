"""What a recipe may choose of a DeepSpeed JSON: how many ranks keep a second share of the weights
between them (``group``, hpZ), and what share of the optimizer lies in host memory (``ratio``,
Twin-Flow). Either is there where the JSON has it. And what no JSON may ask for. No torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from strategies.base import Sizes
from strategies.inventory import ResolvedConfig
from strategies.recipe import ABSENT

if TYPE_CHECKING:
    from strategies.engine import RunContext, Workload
    from strategies.launch_file import LaunchFile


HPZ = "zero_hpz_partition_size"
QWZ = "zero_quantized_weights"
OPTIMIZER = "offload_optimizer"
NODE = "node"
"""The group that the launch file gives: as many ranks as a node has GPUs."""

FORCE = "zero_force_ds_cpu_optimizer"
NOT_HERE = {
    "mics_shard_size": "mics",
    "zero_quantized_nontrainable_weights": "quantized_nontrainable_weights",
    "zero_quantized_gradients": "qgz",
    "zenflow": "zenflow",
}
"""Key of a zero_optimization block -> the technique, by its name among the absent."""


def fault(config: Mapping[str, Any]) -> str | None:
    """Why no run can be started by this DeepSpeed config, and the way out."""
    zero = config["zero_optimization"]
    offload = zero.get(OPTIMIZER) or {}
    asked = {name for key, name in NOT_HERE.items() if zero.get(key)}
    for name in sorted(asked | ({"superoffload"} if offload.get("super_offload") else set())):
        return f"there is no {name}: {ABSENT[name]}"
    if offload.get("device", "none") != "none" and config.get(FORCE, True):
        return (
            "accelerate would make the CPU Adam anew, without decoupled weight decay and betas: "
            f'write "{FORCE}": false'
        )
    if zero.get(QWZ) and zero["stage"] != 3:
        return f"{QWZ} is of stage 3, which gathers weights; leave it out"
    if ratio(zero) < 1 and (zero["stage"] != 3 or offload.get("device") != "cpu"):
        return f"{OPTIMIZER} has a ratio, which is of stage 3 and host memory alone; leave it out"
    return None


def group(zero: Mapping[str, Any]) -> int:
    """Neighbouring ranks that have all weights between them once more; 1: none do."""
    return int(zero.get(HPZ, 1))


def ratio(zero: Mapping[str, Any]) -> float:
    """Of the optimizer's elements, the share that is offloaded where any are."""
    return float((zero.get(OPTIMIZER) or {}).get("ratio", 1.0))


def choices(zero: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> what the launch file gives (``Engine.choices``)."""
    found: dict[str, Any] = {"group": NODE} if HPZ in zero else {}
    return found | ({"ratio": ratio(zero)} if "ratio" in (zero.get(OPTIMIZER) or {}) else {})


def with_choices(settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed config with these choices in it.

    Raises:
        ValueError: a value out of range.
    """
    found = copy.deepcopy(dict(settings))
    zero, size, share = found["zero_optimization"], chosen.get("group"), chosen.get("ratio")
    if size not in (None, NODE):
        if not str(size).isdigit() or int(size) < 2:
            raise ValueError(f"group is {size}; {NODE}, or a whole number of ranks from 2")
        zero[HPZ] = int(size)
    if share is not None:
        if not isinstance(share, (int, float)) or not 0 < share < 1:
            raise ValueError(f"ratio is {share!r}; a share of the optimizer between 0 and 1")
        zero[OPTIMIZER]["ratio"] = float(share)
    return found


def write(config: dict[str, Any], zero: Mapping[str, Any]) -> None:
    """Into the config that accelerate has read from the JSON, what ``zero`` says beside it."""
    if HPZ in zero:
        config["zero_optimization"][HPZ] = zero[HPZ]
    if ratio(zero) < 1:
        config["zero_optimization"][OPTIMIZER]["ratio"] = ratio(zero)


def refusal(zero: Mapping[str, Any], ranks: int) -> str | None:
    """Why so many ranks cannot be in groups of ``group``, and the way out."""
    size = group(zero)
    if size == 1 or (size < ranks and ranks % size == 0):
        return None
    if size >= ranks:
        usable = next((n for n in range(ranks // 2, 1, -1) if ranks % n == 0), None)
        other = f"group={usable}, " if usable else ""
        return (
            f"a second share of the weights in each {size} of {ranks} processes takes memory and "
            f"saves no traffic between groups; take {other}more processes, or zero3"
        )
    return f"{ranks} processes are not groups of {size}; take a group that divides them, or zero3"


# ---- sizes ----
# The sizes of DeepSpeed's buffers, settled from the model: its defaults exceed a whole DiT-XL.


PIECES = 16
"""Into how many a rank's optimizer is cut where a share of it is offloaded."""


def overlaps(zero: Mapping[str, Any], device: str) -> bool:
    """Whether communication runs beside the computation, by a zero_optimization block on a
    ``device`` (cpu or cuda). "auto" is true on GPUs, as DDP's does and as users of ZeRO run it; a
    CPU has no streams to overlap on. Where the key is absent DeepSpeed overlaps in stage 3 alone.
    """
    asked = zero.get("overlap_comm")
    if asked is None:
        return zero.get("stage") == 3
    return device != "cpu" if asked == "auto" else bool(asked)


def reduce_buckets(zero: Mapping[str, Any], device: str) -> int:
    """Buckets that gradients are reduced in: stages 1 and 2 fill one while the other is on its way
    where they overlap (DeepSpeed 0.19.8, stage_1_and_2.py, setup_buckets)."""
    return 2 if zero.get("stage") in (1, 2) and overlaps(zero, device) else 1


def buffer_sizes(model: Sizes, buckets: int = 1) -> dict[str, int]:
    """DeepSpeed's buffer sizes, in elements, where gradients are reduced in so many ``buckets``:
    two of them are half as large each, so that overlapping costs no more memory than not.

    With its defaults (5e8 elements a bucket, 1e9 live parameters) the buckets outweigh what ZeRO-2
    saves (DeepSpeed issues 1302, 3734, 5305), and ZeRO-3 keeps every parameter gathered.
    """
    total, block, tensor, bias = model[:4]
    share = min(total // 16, 50_000_000)
    # Stages 1 and 2 assert an even allgather bucket.
    reduced, gathered = (_even(max(tensor, size)) for size in (share // buckets, share))
    return {
        "reduce_bucket_size": reduced,
        "allgather_bucket_size": gathered,
        # ZeRO-3 fetches the next half block while it computes, and lets go of all but two blocks.
        "stage3_prefetch_bucket_size": max(block // 2, 1),
        "stage3_max_live_parameters": 2 * block,
        "stage3_max_reuse_distance": 2 * block,
        # Biases stay gathered: a collective each would cost more than their bytes.
        "stage3_param_persistence_threshold": bias,
        # The optimizer walks a rank's shard in pieces; offloading holds one piece at a time.
        # DeepSpeed leaves pieces below 1 MiB a rank in host memory instead of swapping them.
        # A model that stands for a deeper one is walked in as many.
        "sub_group_size": max((model.here or total) // 8, tensor, 2**20),
    }


def piece_size(model: Sizes, processes: int) -> int:
    """Elements of a rank's optimizer that are dealt to host or device together, where some of it is
    offloaded: small enough for the share that was asked for."""
    return max(1, (model.here or model.total) // (PIECES * processes))


def _even(size: int) -> int:
    return size + size % 2


def swap_block_bytes(tensor: int, processes: int) -> int:
    """The NVMe block size, in bytes: above a rank's share of the largest gradient, float32.

    DeepSpeed swaps gradients from one block on, and reads them back to wherever they lie in the
    shard. Direct I/O wants addresses that are multiples of 512 bytes; a DiT's biases shift the
    gradients off them, the read fails unseen, and the step uses stale gradients (the loss is then
    1 % off after ten steps; see also DeepSpeed issue 2272). Below one block they stay in the host
    buffer that they are in anyway. Whole shards are aligned, and are still swapped.
    """
    share = 4 * -(-tensor // processes)
    return max(2**20, 1 << share.bit_length())


# ---- settled ----
# DeepSpeed's JSON with every number in place: what a run settles for itself before it starts, and
# what is handed to a trainer that knows nothing of this house. The same functions do both.


JSON = "deepspeed.json"
NVME_BLANK = "/FILL/IN/A/FOLDER/ON/NVME"
NVME_TOLD = "a folder on a local NVMe drive; each process swaps its shard there"
OFFLOADS = ("offload_optimizer", "offload_param")
PRECISIONS = ("bf16", "fp16")


def settle(config: dict[str, Any], work: Workload, processes: int, device: str) -> None:
    """Write into a DeepSpeed config what the spec, the model and the ``device`` own. The JSON says
    "auto" or an explicit 0.0 there; left alone, accelerate would clip at 1.0."""
    config["train_micro_batch_size_per_gpu"] = work.micro_batch
    config["gradient_clipping"] = work.clip
    for _, block in nvme_blocks(config):
        block["nvme_path"] = str(work.scratch)
    zero = config["zero_optimization"]
    sizes = buffer_sizes(work.sizes, reduce_buckets(zero, device))
    if ratio(zero) < 1:
        sizes["sub_group_size"] = piece_size(work.sizes, processes)
    _fill(zero, {**sizes, "overlap_comm": overlaps(zero, device)})
    block_size = swap_block_bytes(work.sizes.tensor, processes)
    _fill(config.get("aio", {}), {"block_size": block_size})


def _fill(block: dict[str, Any], values: Mapping[str, Any]) -> None:
    block.update({key: value for key, value in values.items() if block.get(key) == "auto"})


def nvme_blocks(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The offload blocks of a config that swap to files, by name."""
    blocks = [(name, config["zero_optimization"].get(name) or {}) for name in OFFLOADS]
    return [(name, block) for name, block in blocks if block.get("device") == "nvme"]


def sixteen_bits(config: dict[str, Any], *, master: bool, scale: int) -> None:
    """Write how 16-bit weights are kept (``Engine.sixteen_bits``)."""
    if not master:
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if scale:
        power = scale.bit_length() - 1
        config["fp16"] |= {"loss_scale": 0, "initial_scale_power": power}


def settled(
    file: LaunchFile,
    launch: RunContext,
    work: Workload,
    mixed_precision: str,
    configure: Callable[[Any], None],
    folder: Path,
) -> ResolvedConfig:
    """The launch file and its JSON as a run of ``launch`` would end up with them."""
    config = copy.deepcopy(file.settings)
    settle(config, work, launch.processes, launch.device)
    configure(_holding(config))
    _as_accelerate_does(config, launch, mixed_precision)
    content = copy.deepcopy(file.content)
    content["num_processes"] = launch.processes
    # accelerate refuses a "mixed_precision" beside a DeepSpeed file: the JSON says it.
    content["deepspeed_config"]["deepspeed_config_file"] = str(folder / JSON)
    handlers = ('InitProcessGroupKwargs(backend="gloo")',) if launch.device == "cpu" else ()
    return ResolvedConfig(content, {JSON: config}, dict(_blanks(config)), handlers)


def _holding(config: dict[str, Any]) -> Any:
    """What stands for an ``Accelerator`` of which a strategy asks DeepSpeed's config alone."""
    plugin = SimpleNamespace(deepspeed_config=config)
    return SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))


def _as_accelerate_does(config: dict[str, Any], launch: RunContext, mixed_precision: str) -> None:
    """What accelerate writes in place of "auto" while it prepares."""
    accumulation = launch.accumulation
    samples = config["train_micro_batch_size_per_gpu"] * accumulation * launch.layout.data
    batches = {"train_batch_size": samples, "gradient_accumulation_steps": accumulation}
    _fill(config, batches)
    for name in PRECISIONS:
        block = config.setdefault(name, {"enabled": "auto"})
        _fill(block, {"enabled": name == mixed_precision})


def _blanks(config: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, _ in nvme_blocks(config):
        yield f"{JSON}: zero_optimization.{name}.nvme_path", NVME_TOLD
