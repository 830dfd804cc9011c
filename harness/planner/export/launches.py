"""Recipe and numbers of accelerate's and DeepSpeed's settings, as their libraries run them.
Every key is read, changes no memory (``IDLE``), or is named as not counted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.planner import pool
from harness.planner.export.files import ACCELERATE, DEEPSPEED, Found, flat
from harness.planner.verdict import Uncounted
from strategies import CATALOG, launch_file, users_launch
from strategies.base import BadInput
from strategies.engines.zero.config import NOT_HERE, OFFLOADS, overlaps
from strategies.files import own_table
from strategies.launch_file import LaunchFile
from strategies.launch_keys import AUTO, BATCH, as_number, batch_of, enabled, table, truth

OF_NODE = ("--nproc_per_node", "--nproc-per-node", "--num_gpus")
COUNTS = ("num_processes", "--num_processes", *OF_NODE)
KINDS = {"--use_deepspeed": "DEEPSPEED", "--use_fsdp": "FSDP", "--multi_gpu": "MULTI_GPU",
         "--use_megatron_lm": "MEGATRON_LM", "--tpu": "XLA"}  # fmt: skip
"""Flag of ``accelerate launch`` -> distributed type that it sets."""
OFF = ("none", "false", "no", "", "null")
KEYS = own_table(Path(__file__).with_name("launch_keys.yaml"))
IDLE, READ = ({f"{block}.{key}".removeprefix("top.") for block, keys in KEYS[kind].items()
               for key in keys} for kind in ("idle", "read"))  # fmt: skip
"""Keys, and blocks of keys, that change no memory of a step; those that the recipe or its engine
has."""
READ |= {*BATCH}
LEFT: Mapping[str, Sequence[str]] = KEYS["left"]
"""Keys, and blocks of keys, that are not counted: the direction in which they err, and why."""
LESSER = ("zero_quantized_nontrainable_weights", "cpu_checkpointing", "partition_activations")
"""Keys of a DeepSpeed JSON that no engine here runs, with which less is needed."""
OPTIMIZERS = {"adam": "", "adamw": "", "cpuadam": "", "sgd": "sgd", "muon": "muon"}
"""Optimizer of a DeepSpeed JSON -> its part of a recipe."""
BACKENDS = ("AO",)
"""Libraries of accelerate's fp8 whose layers are predicted."""


@dataclass
class Launch:
    """Start of the processes.
    ``precision``: accelerate's word, or empty. ``parts``: further parts of the recipe.
    ``unpredicted``: settings that no part has."""

    sharding: str = "single"
    processes: int = 1
    precision: str = ""
    micro_batch: int = 1
    accumulation: int = 1
    means: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    unpredicted: list[Uncounted] = field(default_factory=list)

    def left(self, what: str, why: str, errs: str = "") -> None:
        """Name a setting that is not counted."""
        self.unpredicted.append(Uncounted(what, why, errs))


def launch_of(found: Sequence[Found], processes: int | None = None) -> Launch:
    """Return the launch of the files; ``processes`` replaces their number of GPUs.

    Raises:
        BadInput: accelerate or DeepSpeed refuses the files.
    """
    content, config, path = _merged(found)
    counts = {name: one.options[name] for one in reversed(found) for name in COUNTS
              if name in one.options}  # fmt: skip
    made = Launch()
    named = (content.get(users_launch.BLOCK) or {}).get(users_launch.BESIDE)
    if named and config is None and users_launch.kind_of(content) == users_launch.ZERO:
        fault = f"{users_launch.BESIDE} is {named!s:.80}, which is not there"
        raise BadInput(f"{path}: {fault}; give it as another FILE")
    words = {k: v for one in reversed(found) for k, v in one.launcher.items()}
    given = processes or _count({**counts, **words}, made)
    samples, micro, steps = batch_of({} if given else config or {})
    implied = 0
    if samples and micro and steps and samples % (micro * steps) == 0:
        implied = samples // (micro * steps)
    made.processes = given or implied or 1
    gpus = f"{made.processes} GPU" + "s" * (made.processes > 1)
    if path is None:
        made.precision = str(content.get("mixed_precision") or "").lower()
        made.sharding = "single" if made.processes == 1 else "ddp"
        planned = f"so {made.sharding} on {gpus} is predicted; give it as another FILE"
        for option, lost in ((k, v) for f in found for k, v in f.lost.items() if k in f.launcher):
            made.left(f"{option} {lost:.80}", f"it is not there, {planned}")
        return made
    if not given:
        made.assumed.append(f"{gpus}: no file names a number; give --gpus N")
    sure = given or (made.processes if config is not None else None)
    content.setdefault("num_processes", made.processes)
    file, passed = users_launch.launch_file_of(path, content, config, sure)
    for text in passed:
        what, _, why = text.partition(": ")
        made.left(what, why, "none")
    _read(file, config, made)
    _name(content, config, file, made)
    return made


def _merged(found: Sequence[Found]) -> tuple[dict[str, Any], Any, Path | None]:
    """Return accelerate's settings, the DeepSpeed JSON, and the file that has them, if any."""
    content: dict[str, Any] = {}
    config, path = None, None
    for one in reversed(found):  # the first file counts
        if one.kind == ACCELERATE:
            content, path = dict(one.data), one.path
        elif one.kind == DEEPSPEED:
            config, path = one.data, path or one.path
    blocks = {key: block for block, keys in table()["accelerate"]["blocks"].items() for key in keys}
    for one in reversed(found):  # and a command before a file
        for flag, value in one.launcher.items():
            name = flag.lstrip("-").replace("-", "_")
            if flag in KINDS:
                content["distributed_type"] = KINDS[flag]
            elif name in blocks and value is not None:
                content[blocks[name]] = {**(content.get(blocks[name]) or {}), name: value}
            elif name in ("mixed_precision", "num_machines", "num_processes"):
                content[name] = as_number(value, integer=True) if name.startswith("num_") else value
        if one.launcher:
            if "zero_stage" in (content.get("deepspeed_config") or {}):
                content.setdefault("distributed_type", "DEEPSPEED")
            path = path or (one.path if content.get("distributed_type") else None)
    if config is not None and not content.get("distributed_type"):
        content["distributed_type"] = "DEEPSPEED"
    if path and "distributed_type" not in content:
        path = None
    return content, config, path


def _count(said: Mapping[str, Any], made: Launch) -> int:
    """Return the number of processes that files or words say; 0 if they say none."""
    name = next((key for key in reversed(COUNTS) if said.get(key) is not None), "")
    each = positive_int(said.get("--nnodes", said.get("--num_nodes"))) if name in OF_NODE else 1
    count = positive_int(said[name]) * (each or 1) if name else 0
    if name and not count:
        made.assumed.append(f"1 GPU: {name} is {said[name]}; give --gpus N")
    if not name and "--multi_gpu" in said:
        made.assumed.append("1 GPU: --multi_gpu stands without --num_processes; give --gpus N")
    if count:
        made.means.append(f"{count} processes" if count > 1 else "1 process")
    return count or (1 if name else 0)


def positive_int(value: Any) -> int:
    """Return a positive whole number; 0 if the value is none."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 7 else 0


def _read(file: LaunchFile, config: Mapping[str, Any] | None, made: Launch) -> None:
    """Set the sharding, the numbers, the precision and further parts."""
    content = file.content
    made.precision = str(content.get("mixed_precision") or "").lower()
    made.precision = "fp16" if truth(content.get("fp16")) and not made.precision else made.precision
    backend = (content.get("dynamo_config") or {}).get("dynamo_backend")
    backend = str(backend or content.get("dynamo_backend") or "no")
    if backend.lower() not in OFF:
        made.left(f"dynamo_backend {backend}", "graphs of a compiled model are not predicted", "")
    if truth(content.get("use_cpu")):
        made.left("use_cpu true", LEFT["use_cpu"][1])
    if file.kind == "DEEPSPEED":
        _zero(file, config, made)
    elif file.kind == "FSDP":
        _fsdp(content, made)
    else:
        made.sharding = "single" if made.processes == 1 else "ddp"
        if file.kind not in ("NO", "MULTI_GPU"):
            made.left(f"distributed_type {file.kind}", f"{made.sharding} on GPUs is predicted")
    _mesh(content, made)
    if made.precision == "fp8":
        library = str((content.get("fp8_config") or {}).get("fp8_backend") or "unnamed").upper()
        if library not in BACKENDS:
            made.left(f"mixed_precision fp8 of {library}", "torchao's float8 layers are predicted")
    if file.kind != "DEEPSPEED":
        made.means.append(made.sharding.rpartition("/")[2])
        return
    zero = file.settings["zero_optimization"]
    there = {name: (zero.get(name) or {}).get("device", "none") for name in OFFLOADS}
    places = [f"{n.partition('_')[2]} on {place}" for n, place in there.items() if place != "none"]
    made.means.append(", ".join([f"ZeRO stage {zero['stage']}", *places]))


def _fsdp(content: Mapping[str, Any], made: Launch) -> None:
    block = content.get("fsdp_config") or {}
    version = block.get("fsdp_version", 1)
    strategy = str(block.get("fsdp_sharding_strategy") or "FULL_SHARD").upper()
    reshard = block.get("fsdp_reshard_after_forward", True)
    if isinstance(reshard, str) and version == 1:  # FSDP1 names the strategy there too
        strategy, reshard = reshard.upper(), True
    numbers = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD",
               "5": "HYBRID_SHARD_ZERO2"}  # fmt: skip
    strategy = numbers.get(strategy, strategy)
    if version != 2:
        named = f"fsdp_version {version}" if "fsdp_version" in block else "no fsdp_version: 2"
        made.left(named, "accelerate runs FSDP of version 1, and version 2 is predicted", "more")
    if version == 2 and strategy != "FULL_SHARD":
        made.left(f"fsdp_sharding_strategy {strategy}", "FSDP2 ignores it", "none")
    first = version != 2 and strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    stays_gathered = reshard is False or first
    made.sharding = "fsdp2_offload" if truth(block.get("fsdp_offload_params")) else "fsdp2"
    machines = as_number(content.get("num_machines", 1), integer=True) or 1
    if "HYBRID" in strategy and machines > 1 and version != 2:
        made.sharding = f"hsdp:replicate={machines}"
    made.sharding += (",reshard=off" if ":" in made.sharding else ":reshard=off") * stays_gathered
    if strategy == "NO_SHARD" and version != 2:
        made.sharding = "ddp"
    if made.processes == 1:
        made.sharding = "single"
    policy = str(block.get("fsdp_auto_wrap_policy") or "NO_WRAP").upper()
    if policy != "TRANSFORMER_BASED_WRAP":
        errs = "more" if policy == "NO_WRAP" else ""
        made.left(f"fsdp_auto_wrap_policy {policy}", "each block is sharded by itself here", errs)
    if truth(block.get("fsdp_activation_checkpointing")):
        made.parts.append("checkpoint")
    if truth(block.get("fsdp_activation_checkpointing_offload")):
        made.parts.append("offload_activations:what=checkpoints")


def _mesh(content: Mapping[str, Any], made: Launch) -> None:
    """Read ``parallelism_config``, whose product has to be the number of processes."""
    block = content.get("parallelism_config") or {}
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    given = {name: block.get(f"parallelism_config_{name}_size", 1) for name in names}
    sizes = {name: int(as_number(size, integer=True) or 1) for name, size in given.items()}
    ranks = math.prod(sizes.values())
    if ranks == 1:
        return
    if ranks != made.processes and sizes["sp"] == 1:
        parts = " x ".join(str(size) for size in sizes.values() if size > 1)
        raise BadInput(
            f"parallelism_config has {parts} processes, and {made.processes} are started; give "
            f"--gpus {ranks}, or correct the sizes"
        )
    shards = sizes["dp_shard"] * sizes["cp"]
    if sizes["dp_replicate"] > 1 and made.sharding.startswith(("fsdp2", "hsdp")):
        made.sharding = f"hsdp:replicate={sizes['dp_replicate']}" if shards > 1 else "ddp"
    elif shards == 1 and made.sharding.startswith("fsdp2"):
        made.sharding = "ddp" if made.processes > 1 else "single"
    made.parts += [f"{name}:ranks={sizes[name]}" for name in ("sp", "tp") if sizes[name] > 1]
    if sizes["cp"] > 1:
        made.left(f"cp_size {sizes['cp']}", "ranks share the tokens of a sample", "less")


def _zero(file: LaunchFile, config: Mapping[str, Any] | None, made: Launch) -> None:
    settings = json.loads(json.dumps(file.settings))
    zero = settings["zero_optimization"]
    samples, micro, steps = batch_of(settings)
    said = as_number((file.content.get("deepspeed_config") or {}).get(BATCH[2]), integer=True)
    steps = steps or (int(said) if said else None)
    if samples and micro is None:
        micro = samples // (made.processes * (steps or 1))
    elif samples and micro and steps is None:
        steps = samples // (made.processes * micro)
    made.micro_batch, made.accumulation = micro or 1, steps or 1
    _precision(settings, made)
    kind = str((settings.pop("optimizer", None) or {}).get("type") or "adamw")
    part = OPTIMIZERS.get(re.sub(r"[^a-z]", "", kind.lower()))
    if part is None:
        made.left(f"optimizer {kind}", "AdamW is predicted")
    made.parts += [part] if part else []
    if zero["stage"] == 0:
        made.sharding = "single" if made.processes == 1 else "ddp"
        made.left("zero_optimization.stage 0", "DeepSpeed keeps flat float32 copies", "more")
        return
    _drop(settings, made)
    own = effective(settings)
    for name in launch_file.names():
        one = CATALOG[name].engine("cuda").file
        if one.kind == file.kind and effective(one.settings) == own:
            made.sharding = name
            return
    # The file as it is planned stands among the predictions.
    left = {k: v for k, v in settings.items() if k not in IDLE}
    plain = users_launch.opened(dataclasses.replace(file, settings=left))
    content = {"distributed_type": plain.kind, "deepspeed_config": {}}
    plain = dataclasses.replace(plain, content=content)
    digest = hashlib.sha256(json.dumps(plain.settings, sort_keys=True).encode()).hexdigest()[:6]
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", file.path.stem)
    folder = pool.default_folder() / "launch" / f"{stem}-{digest}"
    made.sharding = f"@{users_launch.write(plain, folder)}"


def _precision(settings: Mapping[str, Any], made: Launch) -> None:
    for half in ("bf16", "fp16"):
        if enabled(settings, half):
            made.precision = half
    open_to = [h for h in ("bf16", "fp16") if (settings.get(h) or {}).get("enabled") == AUTO]
    if open_to and not made.precision:
        words = f"{' and '.join(open_to)} {'are' if open_to[1:] else 'is'}"
        made.assumed.append(f"float32: {words} auto, as the training sets them")
    block = settings.get("bf16") or {}
    master, states = (truth(block.get(f"bf16_{one}")) for one in
                      ("master_weights_and_grads", "optimizer_states"))  # fmt: skip
    if master and states:
        made.precision = "bf16_pure"
    elif master:
        made.left("bf16_master_weights_and_grads", "master weights take 16 bits", "less")


def _drop(settings: dict[str, Any], made: Launch) -> None:
    """Remove what no engine here runs, and name it."""
    zero = settings["zero_optimization"]
    for (block, key), _ in NOT_HERE.items():
        held = settings.get(block)
        value = held.pop(key, None) if isinstance(held, dict) else None
        if value:
            made.left(f"{block}.{key}", "it is not run here", "less" if key in LESSER else "")
    offload = zero.get("offload_optimizer") or {}
    if offload.pop("super_offload", None):
        made.left("offload_optimizer.super_offload", "plain offload is predicted")
    if offload.get("ratio", 1) < 1:
        what = f"offload_optimizer.ratio {offload.pop('ratio'):g}"
        made.left(what, "all of the state is offloaded here", "more")
    if zero["stage"] < 3 and offload.get("device") == "nvme":
        offload["device"] = "cpu"
        made.left("offload_optimizer.device nvme", "stage 3 alone swaps to NVMe", "none")
    offload = zero.get("offload_param") or {}
    if zero["stage"] < 3 and offload.get("device", "none") != "none":
        zero.pop("offload_param")
        made.left("offload_param", "stage 3 alone offloads parameters", "none")
    elif offload.get("device") == "nvme":
        offload["device"] = "cpu"
        made.left("offload_param.device nvme", "weights are counted in host memory", "less")


def effective(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide an engine's memory, with DeepSpeed's defaults."""
    fields = table()["deepspeed"]["models"]["zero_optimization"]
    zero, found = settings["zero_optimization"], {}
    stage = zero["stage"]
    for name, one in fields.items():
        alone = name.startswith("stage3_") or name in ("sub_group_size", "zero_hpz_partition_size")
        if f"zero_optimization.{name}" in IDLE or (alone and stage < 3):
            continue
        if name == "allgather_bucket_size" and stage == 3:
            continue
        found[name] = zero.get(name, one.get("default"))
    found["overlap_comm"] = overlaps(zero, "cuda")
    for name in OFFLOADS:
        block = {k: v for k, v in (found[name] or {}).items() if k != "nvme_path"}
        inner = fields[name]["fields"]
        there = block.get("device", "none") != "none"
        usual = {k: block.get(k, v.get("default")) for k, v in inner.items() if k != "nvme_path"}
        found[name] = usual if there else None
    known = {*IDLE, *READ, "zero_optimization", "bf16", "fp16"}
    others = {k: v for k, v in settings.items() if k not in known and v not in (None, {}, AUTO)}
    return {**found, **others}


def _name(
    content: Mapping[str, Any], config: Mapping[str, Any] | None, file: LaunchFile, made: Launch
) -> None:
    """Name the keys that change no memory, and those that no rule reads."""
    idle = []
    named = " ".join(one.what for one in made.unpredicted)
    for name, value in {**flat(_active(file)), **flat(config or {})}.items():
        block = name.partition(".")[0]
        if name in (*READ, "optimizer.type") or name.rpartition(".")[2] in named:
            continue
        # accelerate reads it for FSDP1 alone
        version = as_number((content.get("fsdp_config") or {}).get("fsdp_version", 1), integer=True)
        ahead = name == "fsdp_config.fsdp_forward_prefetch" and version == 2
        if ahead or name in IDLE or block in (*IDLE, "optimizer"):
            idle.append(name)
            continue
        if block in ("zero_optimization", "data_types") and file.kind == "DEEPSPEED":
            continue  # the engine is planned with it
        if any(name.startswith(f"{one.what}.") for one in made.unpredicted):
            continue  # its block is named
        # A default of accelerate that is true makes false a setting.
        usual = table()["accelerate"]["blocks"].get(block, {}).get(name.partition(".")[2], {})
        if str(value).lower() not in OFF or truth(usual.get("default")) is True:
            errs, why = LEFT.get(name) or LEFT.get(block) or ("", "no rule reads it")
            made.left(f"{name} {value!s:.40}", why, errs)
    blocks = ("fsdp_config", "deepspeed_config", "megatron_lm_config", "fp8_config")
    idle += [name for name in blocks if content.get(name) and name not in _active(file)]
    made.means += [f"no memory: {', '.join(idle)}"] if idle else []


def _active(file: LaunchFile) -> dict[str, Any]:
    """Return accelerate's settings without the blocks of types that are not started."""
    of_kind = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED",
               "megatron_lm_config": "MEGATRON_LM"}  # fmt: skip
    fp8 = str(file.content.get("mixed_precision")).lower() == "fp8"
    return {
        name: value
        for name, value in file.content.items()
        if of_kind.get(name, file.kind) == file.kind and (name != "fp8_config" or fp8)
    }
