"""Options that ``plan`` and ``export`` share, and any row of a plan in these words.

Both commands take the same options with the same defaults, so that an export is of what was
planned. ``words`` names every number, and so depends on no default.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from harness.commands.options import add_shaping
from harness.export.asked import without_counterpart
from harness.predict.speed.calibrated import NONE
from harness.predict.speed.cards import NODE, Card, size_words
from harness.predict.verdict import Fit
from harness.resolve import Resolved
from harness.subjects import kind_of
from harness.subjects.library import presets

__all__ = ["CUSTOM", "HOST_GIVEN", "LATENT", "add_question", "export_command", "words"]

CUSTOM = "depth=28,width=1152,heads=16,patch=2"
HOST_GIVEN = "as --host-memory says"
"""``Card.host_told`` of a size that was asked for."""
LATENT = 8
"""Pixels of a side that one element of a latent stands for (the VAE's factor)."""


def add_question(parser: Any) -> None:
    """Options of the model, the GPUs, the samples and what else lies on a GPU."""
    add = parser.add_argument
    told = f"a DiT, sizes as in {CUSTOM}, a public model as flux-dev, diffusers:CLASS, or "
    told += "FILE.py:CLASS (default: DiT-XL/2)"
    add("--model", type=presets.canonical, default="DiT-XL/2", help=told)
    add("--gpus", "--processes", dest="processes", type=int, metavar="N",
        help="GPUs, a process each (default: 8 of a DiT, 1 of a public model), or processes of "
        "the CPU (2)")  # fmt: skip
    told = "machines that they are in, alike (default: one for each 8 GPUs)"
    add("--nodes", type=int, metavar="N", help=told)
    told = "results of run --nodes on such machines: their network counts (default: typical)"
    add("--network", type=Path, metavar="DIR", help=told)
    card = parser.add_mutually_exclusive_group(required=True)
    card.add_argument("--gpu", metavar="NAME", help="a card, as A100-80GB (no default)")
    card.add_argument("--gpu-memory", metavar="SIZE", help="or its memory, as 24GiB (no default)")
    card.add_argument("--cpu", action="store_true", help="or the CPU of this machine (no default)")
    told = "host memory of a machine (default: this machine's if it has the card, else 64GiB for "
    told += "each desktop card and 256GiB for each other)"
    add("--host-memory", metavar="SIZE", default="", help=told)
    told = f"what the card was measured to do (default: the best kept; {NONE}: typical figures)"
    add("--calibration", metavar="FILE", default="", help=told)
    told = "samples a step (default: 32 a GPU of a DiT, 1 of a public model)"
    add("--global-batch", type=int, metavar="B", help=told)
    told = "pixels, as 1024 or HEIGHTxWIDTH (default: the public model's usual; a DiT's: 256)"
    add("--resolution", default="", metavar="PIXELS", help=told)
    add_shaping(parser)
    told = "a cache, musubi:FOLDER or finetrainers:FOLDER: its largest samples, and each size of "
    add("--data", default="", metavar="CACHE", help=told + "them (default: made-up samples)")
    told = "models that stay on each GPU too: T5-XXL, T5-XXL:fp8, 2.5GiB, usual (default: none)"
    add("--also", nargs="+", metavar="NAME", default=[], help=told)
    told = "models that each GPU held before, whose memory torch's pool kept when they were freed "
    add("--before", nargs="+", metavar="NAME", default=[], help=told + "(default: none)")
    told = "what counts beside set-up and step: load, encode, validate, each perhaps with ways, as "
    told += "load:fp32 or validate:tiled+encoders; Needs is the largest (default: none)"
    add("--phases", nargs="+", metavar="PHASE", default=[], help=told)


def words(resolved: Resolved, card: Card) -> list[str]:
    """The options that ask for this row on this card, whatever the defaults are."""
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
    for name, value in {"resolution": _resolution(resolved), **given}.items():
        found += [f"--{name}", str(value)] if value else []
    found += ["--also", size_words(card.beside)] if card.beside else []
    if card.host_told == HOST_GIVEN:
        found += ["--host-memory", size_words(card.host_memory)]
    found += ["--before", *spec.before.split(",")] if spec.before else []
    return [*found, *(["--phases", *spec.phases.split(",")] if spec.phases else [])]


def _resolution(resolved: Resolved) -> str:
    """Pixels of a row's samples; of a model that takes square latents, by its data's size."""
    spec = resolved.spec
    if kind_of(spec.model).brings_samples:
        return spec.resolution
    side = spec.data.partition(":")[2]
    return str(LATENT * int(side)) if side.isdecimal() else ""


def export_command(fit: Fit) -> str:
    """The command that exports exactly this row; empty if it cannot be exported."""
    resolved = fit.resolved
    if resolved.spec.sampling or without_counterpart(resolved):
        return ""
    return shlex.join(["./run.sh", "export", fit.label, *words(resolved, fit.gpu)])
