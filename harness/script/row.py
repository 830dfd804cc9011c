"""Rows of a user's script: the script with its arguments, a launch file, and added strategies.

The launching process and the worker both make the row, so the checked row is the row that starts.
It imports no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from harness import ROOT
from harness.launch.sources import digest
from harness.resolve import Resolved
from harness.script.parts import FOREIGN, OPTIMIZERS, own_part
from harness.spec import Spec, SpecError
from strategies import CATALOG, parse
from strategies.base import Reason, Settings, Slot
from strategies.recipe import Recipe
from strategies.strategy import Strategy
from strategies.subject import DataFacts, Subject
from strategies.survey import Survey

LAUNCHERS = ("accelerate", "torchrun", "python", "python3", "deepspeed")
CLIPPING = "gradient clipping"
"""Name of the check that DeepSpeed clips at the script's limit."""
DATA = "its own data"
REFERENCES = ("single", "ddp")
"""Launch files of the reference row: of one process, and of several."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A training script, its arguments, and the folder in which it starts."""

    path: Path
    arguments: tuple[str, ...] = ()
    folder: Path

    @classmethod
    def of(cls, words: Sequence[str], folder: Path) -> Script:
        """Return the script that the words of a command line name; ``folder`` is absolute.

        Raises:
            SpecError: they do not begin with a Python file.
        """
        words = list(words)[1:] if list(words)[:1] == ["--"] else list(words)
        if not words:
            raise SpecError("no script is given; end the command with -- train.py ARGUMENTS")
        first = words[0]
        if first in LAUNCHERS or first.startswith("-"):
            raise SpecError(
                f"script is {first!r}; give the training script itself, as -- train.py "
                "ARGUMENTS. The launch files and --processes replace a launcher's options"
            )
        path = (folder / first).absolute()
        if not path.is_file():
            raise SpecError(f"script is {first}, but there is no such file; give its path")
        return cls(path=path, arguments=tuple(words[1:]), folder=folder)

    @property
    def text(self) -> str:
        """The script's name and arguments, as the report shows them."""
        return shlex.join([self.path.name, *self.arguments])

    @property
    def identity(self) -> str:
        """Hash of the script, of Python files beside it, and of the words that start it."""
        hasher = hashlib.sha256(repr((self.path, self.arguments, self.folder)).encode())
        for path in sorted({self.path, *self.path.parent.glob("*.py")}):
            hasher.update(path.name.encode() + path.read_bytes())
        return hasher.hexdigest()[:16]

    def words(self) -> list[str]:
        """Return the words behind ``--`` of a worker's command line."""
        folder = [] if self.folder == ROOT else ["--folder", str(self.folder)]
        path = self.path
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        return [*folder, "--", name, *self.arguments]


@dataclass(frozen=True, kw_only=True)
class ScriptModel(Subject):
    """The model that a script prepares, unknown until then.

    ``members`` are its blocks; ``frozen`` names their linear layers that take no gradient.
    """

    script: Script
    members: Sequence[Any] = field(default=(), compare=False)
    frozen: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.script.path.name

    @property
    def identity(self) -> str:
        return f"{self.script.identity}-{digest(('script',))}"

    @property
    def survey(self) -> Survey:
        sizes: Any = None  # unknown without a run
        return Survey(0, sizes, flops=0, depth=max(1, len(self.members)), linears=self.frozen)

    def groups(self, module: Any) -> list[Sequence[Any]]:
        return [self.members]

    def found(self, blocks: Sequence[Any], frozen: tuple[str, ...]) -> ScriptModel:
        """Return this model once it is prepared, with its blocks, and their frozen linears."""
        return dataclasses.replace(self, members=blocks, frozen=frozen)


@dataclass(frozen=True, kw_only=True)
class ScriptRow(Resolved):
    """One run of a script.

    ``clip``: the limit of the gradient norm that the script applies, as another row recorded it;
    None if unknown. ``check``: take two steps alone.
    """

    offline: ClassVar[bool] = False
    script: Script
    clip: float | None = None
    check: bool = False

    @property
    def own_model(self) -> str:
        return ""  # the spec's model is the script's text; its subject has its identity

    @property
    def runs_users_code(self) -> bool:
        return True

    def words(self, out: str) -> list[str]:
        spec = self.spec
        given = {"recipe": spec.recipe, "processes": spec.processes, "device": spec.device}
        given |= {"warmup": spec.warmup, "steps": spec.steps, "seed": spec.seed, "out": out}
        if self.clip is not None:
            given["clip"] = self.clip
        given |= {"repeat": spec.repeat} if spec.repeat else {}
        options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        options += ["--check"] if self.check else []
        return ["-m", "harness.script.run", *options, *self.script.words()]


def row_of(
    script: Script, recipe: str, *, clip: float | None = None, check: bool = False, **fields: Any
) -> ScriptRow:
    """Return the row of ``script`` under a recipe: a launch file and added strategies.

    ``fields`` are those of a spec.

    Raises:
        BadInput: an unknown launch file or strategy.
    """
    asked = parse(recipe, ema=False)
    parts, refusal = parts_of(asked)
    if asked.alone(fields["device"]):
        fields["processes"] = 1
    spec = Spec(
        recipe=asked.text, model=script.text, data=DATA, objective="own", ema=0.0, global_batch=1,
        **fields,
    )  # fmt: skip
    spec.check()
    model = ScriptModel(model=script.text, data=DataFacts(1, 1, 1, 1), script=script)
    own = Recipe(tuple(parts), asked.text)
    launch = own.launch(spec.device, spec.processes, model)
    # Nothing is known of the products of a script's step.
    traits = launch.traits | {"other_products", "own_loop"}
    launch, text = dataclasses.replace(launch, traits=traits), ""
    if "stages" in launch.traits:
        text = "a script calls its whole model, which a pipeline cannot cut; take fsdp2 or zero3"
    elif getattr(launch.engine, "prefetch", 0):
        text = "the order of a script's blocks is unknown; leave prefetch out"
    name = launch.sharding
    unfit = Reason.read(f"{name}: {text}", name) if text else None
    return ScriptRow(
        spec=spec,
        recipe=own,
        launch=launch,
        subject=model,
        settings=Settings(ema_decay=0.0),
        micro_batch=0,
        refusal=refusal or unfit or own.refusal(launch),
        script=script,
        clip=clip,
        check=check,
    )


def parts_of(recipe: Recipe) -> tuple[list[Strategy], Reason | None]:
    """Return the parts that apply to a script, and why a named one does not; None if all do."""
    named = {word.partition(":")[0] for word in recipe.text.split("+")}
    parts, refusal = [recipe.sharding], None
    for part in recipe.strategies:
        if part.slot == Slot.SHARD or part.name not in named:
            continue
        able = (*FOREIGN, *OPTIMIZERS)
        why = f"it needs model parts that a script does not name; add one of {', '.join(able)}"
        if part.name in able:
            parts.append(own_part(part))
            continue
        if part.slot in (Slot.PRECISION, Slot.ACCUMULATE):
            why = "the script sets it; give the script's own option behind --"
        elif part.slot in (Slot.ADAPT, Slot.SPARSIFY, Slot.STORE):
            why = "the script's optimizer already has its parameters; change the script instead"
        refusal = refusal or Reason.read(f"{part.name}: {why}", part.name)
    return parts, refusal


def launch_name(word: str) -> str:
    """Return the sharding that a word of ``--launch`` names: a path is a user's own file."""
    path = Path(word.removeprefix("@"))
    is_path = word.startswith("@") or path.suffix in (".yaml", ".yml", ".json") or "/" in word
    return f"@{path.absolute()}" if is_path else word


def recipes_of(launches: Sequence[str], added: Sequence[str], processes: int) -> list[str]:
    """Return the recipes to compare: the reference, and each launch file alone and with each of
    ``added``.

    Raises:
        BadInput: an unknown name.
    """
    files = dict.fromkeys([REFERENCES[processes > 1], *map(launch_name, launches)])
    for name in files:
        kind = name.partition(":")[0]
        if kind in CATALOG and CATALOG[kind].slot != Slot.SHARD:
            raise SpecError(f"launch is {name}, which is a strategy; give --with {name}")
    texts = [text for name in files for text in (name, *(f"{name}+{word}" for word in added))]
    return list(dict.fromkeys(parse(text, ema=False).text for text in texts))
