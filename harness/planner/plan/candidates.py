"""Rows that ``plan`` predicts: the model, card and recipes of the options, checked and resolved."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.data.feed import check_data
from harness.phases import planned, planned_text
from harness.planner import before_step, edits, resident_models
from harness.planner.before_step import Before
from harness.planner.calibration import store
from harness.planner.export import trainers
from harness.planner.plan.request import HOST_GIVEN, LATENT
from harness.planner.speed import rates
from harness.resolve import Resolved, resolve
from harness.spec import LATER, Spec, SpecError, located, model_name
from harness.subjects import kind_of, usual_objective
from harness.suite.file import load_suite
from harness.system import cards, gpus
from harness.system.capability import shortfall
from harness.system.cards import Card
from strategies import CATALOG, parse
from strategies.base import BadInput, Slot
from strategies.subject import Subject
from strategies.words import name_of
from strategies.workloads import SAMPLE

WHOLE = "+bf16+checkpoint"
ALIKE = ["ddp+bf16_pure+lora:rank=16+checkpoint", f"zero3{WHOLE}", f"fsdp2{WHOLE}"]
"""Recipes that take any number of GPUs, planned for a public model on several nodes."""
SHARING = (8, 4, 2)
"""Sequence-parallel ranks to try; the first number that the model can be split for is planned."""
STAGES = (8, 4)
"""Pipeline stages, as many as the GPUs of a node or half of them; each number is a row."""


DEFAULT_GPU_BATCH = 32
"""Samples per GPU for a DiT. A public model has one, the usual start of its trainers."""
DEFAULT_PIXELS = 256
GPUS, CPU_PROCESSES = 8, 2
"""Default number of processes; a public model has one."""


class PlanError(BadInput):
    """A plan that cannot be made: one line with the key, its value and a hint."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Checked rows of a plan, and the suite's recipes that are impossible, with the reason.
    ``searched``: the rows are a lattice, of which the fastest that fit are searched. ``processes``:
    the GPUs requested, even if a one-process recipe uses only one of them. ``before``: what comes
    before the step, if it is counted."""

    resolved: list[Resolved]
    refused: list[tuple[str, str]]
    gpu: Card
    processes: int = 1
    searched: bool = False
    before: Before | None = None


def _before(row: Resolved, gpu: Card, options: argparse.Namespace) -> Before | None:
    """Return what comes before the step; None if texts and latents are cached, or if the phases
    that count were named."""
    asked = options.cached or options.phases or options.also or options.workload == SAMPLE
    return None if asked else before_step.of(row, gpu)


def asked_for(options: argparse.Namespace) -> Asked:
    """Check the options and resolve every row.

    Raises:
        BadInput: one line. A recipe that was named must be possible; an impossible recipe of a
            suite is reported as refused.
    """
    if options.workload == SAMPLE and options.processes not in (None, 1):
        raise PlanError(
            f"gpus is {options.processes}, but one GPU draws the samples; leave --gpus out"
        )
    if options.processes is None:
        public = kind_of(model_name(options.model)).brings_samples
        usual = CPU_PROCESSES if options.cpu else 1 if public else GPUS
        options.processes = 1 if options.workload == SAMPLE else usual
    if options.processes < 1:
        raise PlanError(f"gpus is {options.processes}; give --gpus at least 1")
    if options.jobs is not None and options.jobs < 1:
        raise PlanError(f"jobs is {options.jobs}; give --jobs at least 1")
    _check_kinds(options)
    gpu = card_of(options)
    phases = _phases(options)
    if options.also:
        found = resident_models.of(options.also, options.model)
        told = resident_models.words(found, at_work="encode" in phases)
        total = sum(one.bytes for one in found)
        gpu = dataclasses.replace(gpu, beside=total, beside_told=told, also=tuple(options.also))
    sizes = _resolutions(options)
    base = dataclasses.replace(_base(options), phases=phases)
    base.check()
    for size in sizes:
        resolve(dataclasses.replace(base, resolution=size))  # refuses one that cannot be
    fields = {"gpu": gpu, "processes": options.processes}
    named = options.recipes or options.suite
    # For a CPU, several nodes and samples the bounds of a search do not hold: they have lists.
    if not (named or options.workload == SAMPLE or gpu.shared or options.processes > gpu.linked):
        rows = _lattice(base, gpu, options)
        before = _before(rows[0], gpu, options)
        return Asked(resolved=rows, refused=[], searched=True, before=before, **fields)
    if options.trainer:
        raise PlanError("--trainer filters a search, and this plan has a list; leave it out")
    rows, refused = [], []
    usual = _across(options, base, gpu) or _recipes(options)
    for recipe in usual if named else for_card(usual, gpu):
        try:
            rows.append(_row(base, recipe, whole_batches=options.largest != "batch"))
        except BadInput as error:
            if options.recipes:
                raise
            if recipe in usual:
                refused.append((recipe, str(error)))
    if not rows:
        raise PlanError(f"no recipe can be planned: {refused[0][0]}: {refused[0][1]}")
    before = _before(max(rows, key=lambda row: row.spec.processes), gpu, options)
    return Asked(resolved=rows, refused=refused, before=before, **fields)


def for_card(recipes: Sequence[str], gpu: Card) -> list[str]:
    """Replace bfloat16 by float16 in default recipes if ``gpu`` has no bfloat16."""
    if gpu.capability is None or not shortfall("bf16", gpu.capability, gpu.name):
        return list(recipes)
    return list(dict.fromkeys(re.sub(r"\+bf16(_pure)?\b", "+fp16", text) for text in recipes))


def half_of(gpu: Card) -> tuple[str, ...]:
    """Return the 16-bit precisions of a card, the purest first."""
    return tuple(text.removeprefix("+") for text in for_card(["+bf16_pure", "+bf16"], gpu))


def without_recipes(options: argparse.Namespace, row: Resolved) -> Asked:
    """Return the plan that names no recipe, of those that train the weights that ``row`` trains."""
    asked = asked_for(argparse.Namespace(**{**vars(options), "recipes": None}))
    rows = [one for one in asked.resolved if edits.adapts(one) == edits.adapts(row)]
    return dataclasses.replace(asked, resolved=rows)


def _lattice(base: Spec, gpu: Card, options: argparse.Namespace) -> list[Resolved]:
    """Return the lattice; with ``--trainer``, the rows of which one of them has all parts."""
    whole = options.largest != "batch"
    rows = list(_lattice_of(base, half_of(gpu), whole_batches=whole))
    if not rows:  # the model itself is refused, and the plainest recipe says why
        rows = [_row(base, edits.SHARDINGS[base.processes > 1][0], whole_batches=whole)]
    if not options.trainer:
        return rows
    some = [row for row in rows if any(trainers.has(name, row) for name in options.trainer)]
    if not some:
        told, model = " or ".join(options.trainer), rows[0].spec.model
        raise PlanError(f"trainer is {told}, and none of its recipes trains {model}; leave it out")
    return some


@functools.lru_cache(maxsize=16)
def _lattice_of(base: Spec, half: Sequence[str], *, whole_batches: bool) -> Sequence[Resolved]:
    """Return the lattice in the 16-bit precisions ``half``; cards that have them share it."""
    adapters = edits.ADAPTERS if kind_of(base.model).brings_samples else ()

    def row(recipe: str) -> Resolved:
        return _row(base, recipe, whole_batches=whole_batches)

    return edits.lattice(row, base.processes > 1, half, adapters)


def _resolutions(options: argparse.Namespace) -> Sequence[str]:
    """Take the largest size of ``--resolution A,B``, which decides the memory; return all, or
    nothing for a single size."""
    texts = list(dict.fromkeys(options.resolution.replace(" ", "").split(",")))
    if len(texts) < 2:
        return ()
    if odd := [text for text in texts if not re.fullmatch(r"\d+(x\d+)?", text)]:
        raise PlanError(f"resolution has {odd[0]!r}; write pixels, as 512,1024 or 512,768x1024")
    texts.sort(key=lambda text: -int(text.partition("x")[0]) * int(text.rpartition("x")[2]))
    if not kind_of(model_name(options.model)).brings_samples:
        raise PlanError(
            f"resolution is {options.resolution}, and model {options.model} has samples of one "
            f"size; give the largest: --resolution {texts[0]}"
        )
    options.resolution = texts[0]
    return texts


def _check_kinds(options: argparse.Namespace) -> None:
    """Refuse options that exclude each other, and questions about one recipe if several are set."""
    asked = [name for name in ("largest", "check", "advise", "measured") if getattr(options, name)]
    if options.explain and asked:
        why = "searches many" if asked == ["largest"] else "answers otherwise"
        raise PlanError(f"--explain explains one size, and --{asked[0]} {why}; leave one out")
    if len(asked) > 1:
        raise PlanError(f"--{asked[0]} and --{asked[1]} exclude each other; leave one out")
    of_one = [name for name in asked if name != "largest"]
    count = len(options.recipes or ())
    if of_one and count != 1:
        named = f"{count} are named" if count else "none is named"
        raise PlanError(f"--{of_one[0]} takes one recipe, and {named}; give --recipes RECIPE")


def _phases(options: argparse.Namespace) -> str:
    """Return the requested phases as a spec has them.
    Encoders that stay on each GPU encode in each step. Other encoders are on the GPU while the
    trained model is loaded, as in diffusers' scripts. An encoder that runs in each step stays on
    the GPU."""
    found = planned(options.phases)
    places = set(found.get("encode", ())) & {"alone", "loaded", "step"}
    if "encode" in found and not places:
        places = {"step" if options.also else "loaded"}
        found["encode"] = (*places, *found["encode"])
    usual = resident_models.usual_of(options.model)
    has_vae = any("latent" in resident_models.table()[name] for name in usual)
    for phase, known in (("encode", usual), ("validate", has_vae)):
        if phase in found and not known:
            raise PlanError(
                f"phases has {phase}, and which {'encoders and ' * (not usual)}VAE model "
                f"{options.model} has is not known; leave {phase} out"
            )
    if "step" in places and not options.also:
        part = resident_models.part_in(found["encode"])
        options.also = resident_models.part_of(options.model, part)
    return planned_text(found)


def on_nodes(gpu: Card, gpus: int, nodes: int | None) -> Card:
    """Return ``gpu`` with the number of GPUs on each of ``nodes``; unchanged if ``nodes`` is None.

    Raises:
        PlanError: the nodes cannot share the GPUs equally.
    """
    if nodes is None:
        return gpu
    if nodes < 1 or gpus % nodes:
        near = nodes * max(1, gpus // nodes) if nodes > 0 else 1
        hint = f"give --gpus {near}" if nodes > 0 else "give --nodes at least 1"
        raise PlanError(
            f"nodes is {nodes} and gpus is {gpus}: each node needs the same number of GPUs; {hint}"
        )
    return dataclasses.replace(gpu, node=gpus // nodes)


def card_of(options: argparse.Namespace) -> Card:
    """Return the requested card, calibrated, on its nodes and with the host memory of its machine.

    Without a request, a card that is in this machine has this machine's memory. Other cards
    keep the assumption of ``Card.host_bytes``.

    Raises:
        BadInput: there is no such card or size, or the calibration is of another device.
    """
    if options.cpu:
        gpu = rates.this_cpu()
    elif options.gpu_memory:
        sized = options.gpu_memory
        gpu = _one("gpu-memory", sized, lambda text: cards.of_size(cards.parse_bytes(text)))
    else:
        gpu = _one("gpu", options.gpu, _named)
    gpu, asked = rates.as_calibrated(gpu, options.calibration), options.host_memory
    if asked and gpu.shared:
        raise PlanError(
            f"host-memory is {asked}, but --cpu plans for this machine's memory; leave "
            "--host-memory out"
        )
    own = () if gpu.shared else (cards.named(one.name, one.total_bytes) for one in gpus.visible())
    if asked:
        size = cards.parse_bytes(asked, "host-memory")
        gpu = dataclasses.replace(gpu, host_memory=size, host_told=HOST_GIVEN)
    elif any(card and card.name == gpu.name for card in own):
        size = store.memory_bytes()
        gpu = dataclasses.replace(gpu, host_memory=size, host_told="this machine's")
    if options.cpu and (options.nodes or options.network):
        raise PlanError(
            "--nodes and --network describe GPU machines, and --cpu is one machine "
            "without them; leave out both"
        )
    gpu = on_nodes(gpu, options.processes, options.nodes)
    return rates.with_network(gpu, options.network) if options.network is not None else gpu


def _one(option: str, text: str, named: Callable[[str], Card]) -> Card:
    """Return the card that ``text`` names; refuse several, which need not be equal.
    Every engine here gives each GPU an equal share, so the smallest of unequal GPUs decides. The
    hint also has the larger ones alone, which may fit more."""
    texts = [word.strip() for word in text.split(",") if word.strip()]
    if len(texts) < 2:
        return named(text)
    size = {word: named(word).memory_bytes for word in texts}
    larger = [word for word in texts if size[word] > min(size.values())]
    hints = [f"--gpus {len(some)} --{option} {shlex.quote(min(some, key=size.__getitem__))}"
             for some in (texts, larger) if some]  # fmt: skip
    raise PlanError(
        f"{option} is {text}, and engines give each GPU an equal share, so that the smallest "
        f"decides; give {', or without the smallest '.join(hints)}"
    )


def _named(text: str) -> Card:
    """Return the card of a name, which may end in the card's memory, as RTX4090-24GB."""
    try:
        return rates.find(text)
    except BadInput:
        rest = re.sub(r"[ -]+\d+ ?GB?$", "", text, flags=re.I)
        size = re.search(r"(\d+) ?GB?$", text)
        found = rates.find(rest) if size and rest != text else None
        if found and abs(found.memory_bytes / 2**30 / int(size[1]) - 1) < cards.OFF:
            return found
        raise


def _device(options: argparse.Namespace) -> str:
    return "cpu" if options.cpu else "cuda"


def _base(options: argparse.Namespace) -> Spec:
    model = model_name(options.model)
    kind = kind_of(model)
    given = located({name: getattr(options, name) for name in ("config", "set", "frames", "text")})
    batch = options.global_batch
    if batch is None:
        batch = options.processes * (1 if kind.brings_samples else DEFAULT_GPU_BATCH)
    spec = Spec(
        recipe="single" if options.workload == SAMPLE else "ddp",
        model=model,
        objective=usual_objective(model, given["config"]),
        data="synthetic" if kind.brings_samples else _squares(options, kind, model),
        resolution=options.resolution if kind.brings_samples else "",
        global_batch=batch,
        processes=options.processes,
        device=_device(options),
        # A DiT's reference training keeps an average of the weights; few trainers of public models
        # do.
        ema=vars(options).get("average", 0.0 if kind.brings_samples else Spec.ema),
        workload=options.workload,
        sampler_steps=options.sampler_steps,
        cfg_scale=options.cfg_scale,
        **given,
    )
    spec.check()
    spec = _without_usual_sizes(spec)
    if options.largest != "batch":
        together = max((parse(text).together for text in _recipes(options)), default=1)
        # Raises for a batch that no row can take.
        spec.micro_batch(max(1, spec.processes // together), 1)
    return spec


def _without_usual_sizes(spec: Spec) -> Spec:
    """Leave out sizes of samples that are the model's usual ones.
    A prediction is kept by its spec, so a size that is spelt out would be traced anew."""
    sizes = ("resolution", "frames", "text")
    given = [name for name in sizes if getattr(spec, name) != LATER[name]]
    if not given or not kind_of(spec.model).brings_samples:
        return spec
    size = resolve(spec).subject.size_in_words
    for name in given:
        less = dataclasses.replace(spec, **{name: LATER[name]})
        if resolve(less).subject.size_in_words == size:
            spec = less
    return spec


def _squares(options: argparse.Namespace, kind: type[Subject], model: str) -> str:
    """Return the data of a model that takes square latents, from the requested pixels."""
    text = options.resolution or str(DEFAULT_PIXELS)
    tile = kind(model=model, data=check_data("synthetic")).tile
    step = LATENT * tile
    pixels = int(text) if text.isdecimal() else 0
    if pixels < step or pixels % step:
        near = max(step, round(pixels / step) * step)
        raise PlanError(
            f"resolution is {text}; {options.model} takes multiples of {step} "
            f"({LATENT} pixels a latent x patch {tile}), as {near}"
        )
    return f"synthetic:{pixels // LATENT}"


def _recipes(options: argparse.Namespace) -> list[str]:
    """Return each recipe once; on one GPU, replicas become plain training."""
    asked = options.recipes
    if not asked and not options.suite and options.workload == SAMPLE:
        options.suite = "sampling"
    if not asked:
        suite = load_suite(options.suite or "default", _device(options))
        asked = [row.recipe for row in suite.rows]
    if any("" in recipe.replace(" ", "").split("+") for recipe in asked):
        told = " ".join(asked)
        raise PlanError(f"recipes {told!r} have an empty part; write each as one word, as ddp+bf16")
    rows = (_sharded(recipe, options.processes, _device(options)) for recipe in asked)
    return list(dict.fromkeys(rows))


def _sharded(recipe: str, processes: int, device: str) -> str:
    """Return the recipe with ``single`` on one process, if it names no sharding or replicas."""
    names = [name_of(word, CATALOG) for word in recipe.replace(" ", "").split("+")]
    known = any(name not in CATALOG or CATALOG[name].slot == Slot.SHARD for name in names)
    if processes > 1 and not known:
        named = ", ".join(f"{word}+{recipe}" for word in ("ddp", "zero2", "zero3", "fsdp2"))
        raise PlanError(
            f"recipe {recipe!r} names no sharding for {processes} GPUs; add one of {named}"
        )
    recipe = recipe if known else f"single+{recipe}"
    sharding = parse(recipe).sharding if processes == 1 else None
    if sharding is None or "replicas" not in sharding.engine(device).traits:
        return recipe
    return "+".join("single" if word == sharding.name else word for word in recipe.split("+"))


def _across(options: argparse.Namespace, base: Spec, gpu: Card) -> list[str]:
    """Return the usual recipes for a public model on several nodes that are possible; else nothing.
    Of the numbers of sequence-parallel ranks the first is planned that the model can be split
    for."""
    named, ranks, node = options.recipes or options.suite, base.processes, gpu.linked
    if named or options.workload == SAMPLE or gpu.shared or ranks <= node or ranks % node:
        return []
    if not kind_of(base.model).brings_samples:
        return []

    def able(recipe: str) -> bool:
        try:
            return bool(_row(base, recipe, whole_batches=True))
        except BadInput:
            return False

    shared = [f"fsdp2+sp:ranks={count}{WHOLE}" for count in SHARING if count <= node]
    # One sample per GPU: as many micro-batches as pipeline stages.
    stages = [count for count in STAGES if count <= node and ranks % count == 0]
    pipelines = [f"pp:stages={count},micro={count}{WHOLE}" for count in stages]
    hybrid = f"hsdp:replicate={ranks // node}{WHOLE}"
    return [*ALIKE, hybrid, *list(filter(able, shared))[:1], *filter(able, pipelines)]


def _row(base: Spec, recipe: str, whole_batches: bool) -> Resolved:
    """Resolve a recipe under the plan's settings; a launch file of one process has one.
    If the batch is searched for (not ``whole_batches``), the requested batch need not be
    divisible."""
    parsed = parse(recipe, workload=base.workload)
    processes = 1 if parsed.alone(base.device) else base.processes
    batch = base.global_batch if whole_batches else processes * parsed.accumulation
    spec = dataclasses.replace(base, recipe=parsed.text, processes=processes, global_batch=batch)
    resolved = resolve(spec)
    if resolved.refusal:
        raise SpecError(f"{recipe}: {resolved.refusal}")
    return resolved
