"""Sharding: who holds which parameters, gradients and optimizer state. Its launch file says so.

A sharding strategy *is* its file in ``launch_configs/``: the accelerate YAML (and the DeepSpeed
JSON it names) is the one owner of engine, ZeRO stage and offload. Python reads those facts here,
and reads them back from the engine as evidence. Adding one adds a YAML (and a JSON), no Python.

``NAME.yaml`` serves every device; where ``NAME.cpu.yaml`` lies beside it, that one serves
machines without a GPU (accelerate's GPU launch types silently train unconnected models there).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from strategies.base import BadInput, Launch, Slot, Strategy, Trained, demand

__all__ = ["FOLDER", "LaunchFile", "LaunchFileError", "Sharding", "read", "sharding_kinds"]

FOLDER = Path(__file__).resolve().parent.parent / "launch_configs"
ENGINES = {"NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED"}


class LaunchFileError(BadInput):
    """A launch file that cannot be read or lacks a fact: names the file and the way out."""


@dataclass(frozen=True, kw_only=True)
class LaunchFile:
    """What a launch file says. ``deepspeed`` is the JSON's content, None outside DeepSpeed."""

    path: Path
    engine: str
    title: str
    source: str
    deepspeed: dict[str, Any] | None = None

    @property
    def zero(self) -> dict[str, Any]:
        """The JSON's zero_optimization block, empty outside DeepSpeed."""
        return (self.deepspeed or {}).get("zero_optimization", {})

    def offload(self, what: str) -> str:
        """Where "optimizer" or "param" is offloaded to: none, cpu or nvme."""
        return self.zero.get(f"offload_{what}", {}).get("device", "none")


def read(path: Path) -> LaunchFile:
    """Read an accelerate YAML and the JSON it names.

    Raises:
        LaunchFileError: missing, not YAML or JSON, or without the engine it must name.
    """
    text = _text_of(path)
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise LaunchFileError(f"{path}: not YAML ({str(error).splitlines()[0]})") from None
    engine = content.get("distributed_type") if isinstance(content, dict) else None
    if str(engine) not in ENGINES:
        raise LaunchFileError(
            f"{path}: distributed_type is {engine!r}; one of {', '.join(sorted(ENGINES))} (quoted)"
        )
    comments = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
    return LaunchFile(
        path=path,
        engine=str(engine),
        title=comments[0] if comments else path.stem,
        source=comments[1].removeprefix("Source: ") if len(comments) > 1 else "",
        deepspeed=_deepspeed_json(path, content) if engine == "DEEPSPEED" else None,
    )


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchFileError(f"{path}: unreadable launch file ({error})") from None


def _deepspeed_json(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    name = content.get("deepspeed_config", {}).get("deepspeed_config_file")
    if not name:
        raise LaunchFileError(f"{path}: names no deepspeed_config_file under deepspeed_config")
    found = path.parent.parent / name
    try:
        config = json.loads(_text_of(found))
    except ValueError as error:
        raise LaunchFileError(f"{found}: not JSON ({error})") from None
    if "zero_optimization" not in config:
        raise LaunchFileError(f"{found}: no zero_optimization block")
    return config


def zero_sizes(total: int, block: int, tensor: int, bias: int) -> dict[str, int]:
    """DeepSpeed's buffer sizes, in elements, for a model of ``total`` trainable parameters.

    DeepSpeed's defaults (5e8 elements a bucket, 1e9 live parameters) exceed a whole DiT-XL: the
    buckets then outweigh what ZeRO-2 saves (DeepSpeed issues 1302, 3734, 5305), and ZeRO-3 keeps
    every parameter gathered. ``block`` is the largest transformer block, ``tensor`` the largest
    parameter, ``bias`` the largest one-dimensional one.
    """
    bucket = max(tensor, min(total // 16, 50_000_000))
    bucket += bucket % 2  # stages 1 and 2 assert an even allgather bucket
    return {
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        # ZeRO-3 fetches the next half block while it computes, and lets go of all but two blocks.
        "stage3_prefetch_bucket_size": max(block // 2, 1),
        "stage3_max_live_parameters": 2 * block,
        "stage3_max_reuse_distance": 2 * block,
        # Biases stay gathered: a collective each would cost more than their bytes.
        "stage3_param_persistence_threshold": bias,
        # The optimizer walks a rank's shard in pieces; offloading holds one piece at a time.
        # DeepSpeed leaves pieces below 1 MiB a rank in host memory instead of swapping them.
        "sub_group_size": max(total // 8, tensor, 2**20),
    }


def swap_block_bytes(tensor: int, processes: int) -> int:
    """The NVMe block size, in bytes: above a rank's share of the largest gradient, float32.

    DeepSpeed swaps gradients from one block on, and reads them back to wherever they lie in the
    shard. Direct I/O wants addresses that are multiples of 512 bytes; a DiT's biases shift the
    gradients off them, the read fails unseen, and the step uses stale gradients (the loss is then
    1 % off after ten steps; see also DeepSpeed issue 2272). Below one block they stay in the host
    buffer that they are in anyway. Whole shards are aligned and are swapped as before.
    """
    share = 4 * -(-tensor // processes)
    return max(2**20, 1 << share.bit_length())


def _model_sizes(module: Any) -> dict[str, int]:
    trainable = [p for p in module.parameters() if p.requires_grad]
    blocks = [sum(p.numel() for p in block.parameters()) for block in module.blocks]
    return zero_sizes(
        total=sum(p.numel() for p in trainable),
        block=max(blocks),
        tensor=max(p.numel() for p in trainable),
        bias=max((p.numel() for p in module.parameters() if p.ndim == 1), default=0),
    )


@dataclass(frozen=True, kw_only=True)
class Sharding(Strategy):
    """Whatever the launch file of this name says."""

    slot: ClassVar[Slot] = Slot.SHARD

    @classmethod
    def path(cls, device: str) -> Path:
        """The launch file for ``device``: the CPU's own where there is one."""
        special = FOLDER / f"{cls.name}.{device}.yaml"
        return special if special.exists() else FOLDER / f"{cls.name}.yaml"

    @classmethod
    def launch(cls, device: str, processes: int) -> Launch:
        """The facts of a launch, read from the file."""
        file = read(cls.path(device))
        return Launch(
            sharding=cls.name,
            engine=file.engine,
            device=device,
            processes=processes,
            zero_stage=file.zero.get("stage", 0),
            offload_optimizer=file.offload("optimizer"),
            offload_param=file.offload("param"),
        )

    def refuses(self, launch: Launch) -> str | None:
        if launch.engine == "NO" and launch.simulated:
            return "trains alone, so there is no world to simulate; leave --world out, or take ddp"
        if launch.simulated and "hooks_allreduce" in launch.traits:
            return "the optimizer's own all-reduce needs real ranks; leave --world out"
        if launch.engine == "NO" and launch.processes > 1:
            return f"trains one process, not {launch.processes}; use --processes 1, or ddp"
        return None

    def accelerator_kwargs(self, launch: Launch) -> dict[str, Any]:
        if launch.device == "cpu" and launch.engine != "DEEPSPEED":
            # torchrun's path drops the launch file's use_cpu; under DeepSpeed it would mean DDP.
            return {"cpu": True}
        if launch.device != "cpu" and not launch.simulated:
            return {}
        from accelerate import InitProcessGroupKwargs

        # Without a named backend accelerate gives DeepSpeed on a CPU no process group at all.
        backend = "fake" if launch.simulated else "gloo"
        return {"kwargs_handlers": [InitProcessGroupKwargs(backend=backend)]}

    def configure(self, accelerator: Any, module: Any) -> None:
        plugin = getattr(accelerator.state, "deepspeed_plugin", None)
        if plugin is None:
            return
        sizes = {f"zero_optimization.{k}": v for k, v in _model_sizes(module).items()}
        largest = max(p.numel() for p in module.parameters())
        sizes["aio.block_size"] = swap_block_bytes(largest, accelerator.num_processes)
        for key, value in sizes.items():
            plugin.fill_match(key, must_match=False, **{key: value})

    def evidence(self, trained: Trained) -> dict[str, Any]:
        found = {
            "distributed_type": trained.accelerator.distributed_type.value,
            "processes": trained.accelerator.num_processes,
        }
        launch = trained.launch
        demand(
            found["distributed_type"] == launch.engine,
            f"accelerate runs {found['distributed_type']}, the launch file says {launch.engine}",
        )
        demand(
            found["processes"] == launch.processes,
            f"{found['processes']} processes share the work, {launch.processes} were asked for",
        )
        if launch.engine == "DEEPSPEED":
            from strategies.support import zero

            return {**found, **zero.evidence(trained)}
        if launch.engine == "NO":
            demand(
                trained.model is trained.module, f"the model is a {type(trained.model).__name__}"
            )
            return {**found, "wrapper": "none"}
        return {**found, **_replicas(trained)}


def _replicas(trained: Trained) -> dict[str, Any]:
    """DDP by its class and by its effect: replicas that saw other samples hold equal weights."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    demand(
        isinstance(trained.model, DistributedDataParallel),
        f"the model is a {type(trained.model).__name__}, not DistributedDataParallel",
    )
    if trained.launch.simulated:  # nobody to compare with: a collective returns one's own
        size = trained.model.process_group.size()
        demand(size == trained.launch.processes, f"DDP averages over {size} ranks")
        return {"wrapper": "DistributedDataParallel", "replicas": size}
    with torch.no_grad():
        sums = torch.stack([p.double().sum() for p in trained.module.parameters()])
    spread = float((trained.accelerator.gather(sums[None]) - sums).abs().max())
    demand(
        spread == 0.0, f"the replicas drifted apart by {spread:.3g}: gradients were not averaged"
    )
    return {"wrapper": "DistributedDataParallel", "replica_spread": spread}


def sharding_kinds(folder: Path = FOLDER) -> dict[str, type[Sharding]]:
    """One strategy a launch file, named after it."""
    names = sorted(p.stem for p in folder.glob("*.yaml") if "." not in p.stem)
    kinds = {}
    for name in names:
        file = read(folder / f"{name}.yaml")
        needs = ("deepspeed",) if file.engine == "DEEPSPEED" else ()
        needs += ("cpu_adam",) if file.offload("optimizer") != "none" else ()
        needs += (
            ("async_io",) if "nvme" in (file.offload("optimizer"), file.offload("param")) else ()
        )
        members = {"name": name, "source": file.source, "needs": needs, "__doc__": file.title}
        kinds[name] = type(name, (Sharding,), {**members, "__module__": __name__})
    return kinds
