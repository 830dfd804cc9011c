"""DeepSpeed's JSON with every number in place: what a run settles for itself before it starts, and
what is handed to a trainer that knows nothing of this house. The same functions do both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from strategies.engines.zero import chosen
from strategies.engines.zero.sizes import (
    buffer_sizes,
    overlaps,
    piece_size,
    reduce_buckets,
    swap_block_bytes,
)
from strategies.settled import Settled

if TYPE_CHECKING:
    from strategies.engine import Launch, Workload
    from strategies.launch_file import LaunchFile

__all__ = ["JSON", "NVME_BLANK", "nvme_blocks", "settle", "settled", "sixteen_bits"]

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
    if chosen.ratio(zero) < 1:
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
    launch: Launch,
    work: Workload,
    mixed_precision: str,
    configure: Callable[[Any], None],
    folder: Path,
) -> Settled:
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
    return Settled(content, {JSON: config}, dict(_blanks(config)), handlers)


def _holding(config: dict[str, Any]) -> Any:
    """What stands for an ``Accelerator`` of which a strategy asks DeepSpeed's config alone."""
    plugin = SimpleNamespace(deepspeed_config=config)
    return SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))


def _as_accelerate_does(config: dict[str, Any], launch: Launch, mixed_precision: str) -> None:
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
