"""Options that ``plan`` and ``export`` share, and the command line and JSON of a plan's row.
Both commands take the same options with the same defaults, so an export matches the plan. ``words``
names every number and thus depends on no default."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from typing import Any

from harness import RUN
from harness.commands.options import add_shaping
from harness.planner.speed.rates import NONE
from harness.planner.verdict import Fit
from harness.resolve import Resolved
from harness.subjects import kind_of
from harness.subjects.library import families
from harness.system.cards import NODE, Card, size_words
from strategies.base import Slot
from strategies.strategy import Strategy
from strategies.workloads import TRAIN

WITHIN = {
    "tensor": "accelerate's parallelism_config has tp_size, for a model that its library has "
    "cut already (a transformers model's tp_plan); any other stays whole",
    "sequence": "accelerate's parallelism_config has sp_size, by DeepSpeed's attention for "
    "transformers models under DeepSpeed, and cp_size, under FSDP2; a diffusion model has neither",
    "pipeline": "accelerate's parallelism_config has no stages; torch.distributed.pipelining has, "
    "with a loop of its own",
}
"""Layouts (``strategies.launch_file.Layout``) that no launch file can ask for, and alternatives.
Source: accelerate 1.15, parallelism_config.py and accelerator.py (``_prepare_tp``,
``_prepare_deepspeed``)."""

WITHOUT_GPU = (
    "accelerate starts FSDP only on GPUs, and on a CPU each process would train a model "
    "of its own without a message; give --gpu CARD"
)
"""Source: accelerate 1.15, state.py (``AcceleratorState.__init__``, below MULTI_GPU)."""


def without_counterpart(resolved: Resolved) -> str:
    """Return why a recipe cannot be exported; empty if it can."""
    launch = resolved.launch
    name = next((name for name in WITHIN if getattr(launch.layout, name) > 1), None)
    if name is not None:
        why = WITHIN[name]
        return f"{resolved.recipe} cannot be exported: {why}; its code is in strategies/"
    if launch.device == "cpu" and "dtensor_weights" in launch.traits:
        return f"{resolved.recipe} cannot be exported: {WITHOUT_GPU}"
    return ""


def techniques(resolved: Resolved) -> list[Strategy]:
    """Return the strategies other than the sharding, which the launch file has."""
    return [part for part in resolved.recipe.strategies if part.slot != Slot.SHARD]


def parameters(part: Strategy) -> dict[str, Any]:
    """Return a strategy's parameters and their values."""
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


def defaults(part: Strategy) -> dict[str, Any]:
    """Return a strategy's parameters and their defaults."""
    return {field.name: field.default for field in dataclasses.fields(part)}


def numbers(resolved: Resolved) -> dict[str, Any]:
    """Return the numbers of the training, by the names that tables and lines use."""
    settings, launch = resolved.settings, resolved.launch
    beta1, beta2 = settings.betas
    return {
        "micro_batch": resolved.micro_batch,
        "accumulation": launch.accumulation,
        "processes": launch.processes,
        "learning_rate": settings.learning_rate,
        "beta1": beta1,
        "beta2": beta2,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "clip": settings.grad_clip,
        "ema_decay": settings.ema_decay,
        "objective": resolved.spec.objective,
        "random_blocks": resolved.subject.random_blocks,
    }


CUSTOM = "depth=28,width=1152,heads=16,patch=2"
HOST_GIVEN = "as --host-memory says"
"""``Card.host_told`` for a size given as an option."""
MODEL = "DiT-XL/2"
"""Model of a plan that names none."""
LATENT = 8
"""Pixels per side that one latent element covers (the VAE's factor)."""
AS_PLANNED = {"workload": TRAIN, "sampler_steps": 0, "cfg_scale": 0.0, "suite": None, "jobs": None}
AS_PLANNED |= dict.fromkeys(("trainer", "largest", "check", "advise", "explain", "measured"))
AS_PLANNED["cached"] = True
"""Options of a plan that commands with ``add_question`` need not take."""


class Counts(argparse.Action):
    """``--gpus``: one number is ``processes``; several are ``counts``, in ascending order."""

    def __call__(self, _parser: Any, options: Any, values: Any, _option: Any = None) -> None:
        counts = sorted(set(values))
        options.processes = counts[0] if len(counts) == 1 else None
        options.counts = counts[len(counts) == 1 :]


def add_question(parser: Any, *, optional: bool = False, several: bool = False) -> None:
    """Add the options for the model, the GPUs, the samples and the other models on a GPU.
    ``optional``: no model is the default, and the card may be known otherwise. ``several``:
    ``--gpus`` takes several numbers (``Counts``)."""
    add = parser.add_argument
    text = f"a DiT, sizes as in {CUSTOM}, a public model as flux-dev, diffusers:CLASS, or "
    usual = None if optional else MODEL
    text += f"FILE.py:CLASS (default: {usual or 'none'})"
    add("--model", type=families.canonical, default=usual, help=text)
    text = "GPUs, one process on each (default: 8 for a DiT, 1 for a public model); CPU "
    text += "processes (default: 2)" + "; several numbers: the answer on each" * several
    more: dict[str, Any] = {"nargs": "+", "action": Counts} if several else {}
    add("--gpus", "--processes", dest="processes", type=int, metavar="N", help=text, **more)
    text = "machines with the same number of GPUs each (default: one for each 8 GPUs, or 4 of "
    add("--nodes", type=int, metavar="N", help=text + "GB200 and GB300)")
    text = "GB/s that a node sends to another (default: typical of the card's machines)"
    add("--network", type=float, metavar="GB_PER_SECOND", help=text)
    card = parser.add_mutually_exclusive_group(required=not optional)
    else_ = "default: the memory that FILE states" if optional else "no default"
    text = f"card, such as A100-80GB ({else_})"
    card.add_argument("--gpu", metavar="NAME", help=text)
    text = "or the memory of a card, such as 24GiB (no default)"
    card.add_argument("--gpu-memory", metavar="SIZE", help=text)
    card.add_argument("--cpu", action="store_true", help="or the CPU of this machine (no default)")
    text = "host memory of a machine (default: this machine's if it has the card, else 64GiB for "
    text += "each desktop card and 256GiB for each other)"
    add("--host-memory", metavar="SIZE", default="", help=text)
    text = f"calibration to use (default: the best one for the card; {NONE}: typical figures)"
    add("--calibration", metavar="FILE", default="", help=text)
    text = "samples a step (default: 32 a GPU for a DiT, 1 for a public model)"
    add("--global-batch", type=int, metavar="B", help=text)
    text = "pixels, as 1024 or HEIGHTxWIDTH; several, as 512,768x1024: the largest is planned, and "
    text += "each is predicted (default: the public model's usual; a DiT's: 256)"
    add("--resolution", default="", metavar="PIXELS", help=text)
    add_shaping(parser)
    text = "other models on each GPU: T5-XXL, T5-XXL:fp8, 2.5GiB, usual (default: none)"
    add("--also", nargs="+", metavar="NAME", default=[], help=text)
    text = "phases to predict besides set-up and step: load, encode, validate; with ways, as "
    text += "load:fp32 or validate:tiled+encoders; Needs is the largest (default: none)"
    add("--phases", nargs="+", metavar="PHASE", default=[], help=text)


def words(resolved: Resolved, card: Card) -> list[str]:
    """Return the options that request this row on this card, independent of the defaults."""
    spec = resolved.spec
    found = ["--model", spec.model, "--gpus", str(spec.processes)]
    if card.shared:
        found.append("--cpu")
    elif card.like:
        found += ["--gpu-memory", size_words(card.memory_bytes)]
    else:
        found += ["--gpu", card.name]
    if card.node != NODE and spec.processes > card.node:
        found += ["--nodes", str(spec.processes // card.node)]
    found += ["--global-batch", str(spec.global_batch)]
    given = {name: getattr(spec, name) for name in ("config", "set", "frames", "text")}
    side = spec.data.partition(":")[2]  # of square latents
    square = str(LATENT * int(side)) if side.isdecimal() else ""
    pixels = spec.resolution if kind_of(spec.model).brings_samples else square
    for name, value in {"resolution": pixels, **given}.items():
        found += [f"--{name}", str(value)] if value else []
    found += ["--also", *card.also] if card.also else []
    if card.host_told == HOST_GIVEN:
        found += ["--host-memory", size_words(card.host_memory)]
    return [*found, *(["--phases", *spec.phases.split(",")] if spec.phases else [])]


def export_command(fit: Fit) -> str:
    """Return the command that exports exactly this row; empty if it cannot be exported."""
    resolved = fit.resolved
    if resolved.spec.sampling or without_counterpart(resolved):
        return ""
    return shlex.join([RUN, "export", fit.label, *words(resolved, fit.gpu)])


def fit_as_json(fit: Fit) -> dict[str, Any]:
    """Return one row: the values derived from its prediction for the card, and the prediction."""
    return {
        "recipe": fit.label,
        "processes": fit.resolved.spec.processes,
        "global_batch": fit.resolved.spec.global_batch,
        "verdict": fit.verdict,
        "lack": fit.lack,
        "uncounted": [dataclasses.asdict(one) for one in fit.uncounted],
        "export": export_command(fit),
        "need_bytes": fit.need_bytes,
        "binds": fit.binds,
        "phases": {name: one._asdict() for name, one in fit.phases.items()},
        "need_spread_bytes": fit.spread_bytes,
        "need_high_bytes": fit.most_bytes,
        "uncertainty": dataclasses.asdict(fit.uncertainty),
        "least_bytes": fit.least_bytes,
        "margin_bytes": fit.margin_bytes,
        "host_bytes_node": fit.host_bytes,
        "host_high_bytes_node": fit.host_most,
        "host_memory_node": fit.host_memory,
        "step_seconds": fit.seconds.total if fit.seconds else None,
        "step_seconds_low": fit.seconds.low if fit.seconds else None,
        "step_seconds_high": fit.seconds.high if fit.seconds else None,
        "sent_bytes": fit.sent._asdict(),
        "prediction": dataclasses.asdict(fit.prediction),
    }
