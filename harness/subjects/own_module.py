"""Models from users' files: a Subject class, or a function such as ``mine.py:make``. No torch at
import.

``make()`` returns ``(module, batch, loss)``. ``batch`` is a mapping of tensors with the same number
of samples along their first axis; ``loss(module, batch)`` returns a scalar. A run or plan repeats
the example's samples as often as needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from harness import opened
from harness.exits import exits_raise
from strategies import survey
from strategies.base import BadInput
from strategies.subject import DataFacts, Shaping, Subject
from strategies.survey import Survey

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


Made = tuple["nn.Module", Mapping[str, "Tensor"], Callable[..., "Tensor"]]


_OPENED: dict[str, set[str]] = {}
"""File of a model -> modules and other files of the user's that its code has opened so far."""


@contextlib.contextmanager
def users_code(model: str) -> Iterator[None]:
    """Run code of the file that ``model`` names, and note the user's files that it opens.

    Raises:
        BadInput: it raised or exited; names the error and the last executed line of that file.
    """
    place = _path(model)
    seen = _OPENED.setdefault(str(place), set())
    try:
        with opened.noted(seen, [place.absolute().parent]), exits_raise():
            yield
    except (BadInput, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename) == place]
        # A file that is not Python, or a missing argument, has no frame in it.
        line = lines[-1] if lines else getattr(error, "lineno", None)
        where = f"{place}, line {line}" if line else place
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise BadInput(f"model {model}: {where}: {what}") from error


@contextlib.contextmanager
def _no_exit(model: str) -> Iterator[None]:
    """Run a forward pass and the loss of ``model``.

    Raises:
        BadInput: they ended the process, which would look like a success.
    """
    try:
        with exits_raise():
            yield
    except SystemExit as stop:
        raise BadInput(
            f"model {model}: its forward or loss ended the process (exit code {stop.code}); "
            "remove sys.exit and os._exit from them"
        ) from stop


@dataclass(frozen=True, kw_only=True)
class OwnModule(Subject):
    """Subject made by a function in a user's file; a subclass sets ``function``."""

    objectives: ClassVar[tuple[str, ...]] = ("own",)
    brings_samples: ClassVar[bool] = True
    function: ClassVar[Callable[[], Any]]

    @classmethod
    def of(cls, shaping: Shaping, **fields: Any) -> Subject:
        if shaping.data != "synthetic":
            raise BadInput(
                f"data is {shaping.data}, and {fields['model']} brings its own example; give "
                "--data synthetic"
            )
        plain = super().of(shaping, **fields)
        samples = _measured(cls, plain.model).samples  # type: ignore[arg-type]  # a class is hashable
        return dataclasses.replace(plain, data=DataFacts(samples, 1, 1, 1))

    @property
    def name(self) -> str:
        return self.model.rpartition("/")[2]

    @property
    def size_in_words(self) -> str:
        return "its own example"

    # ---- identity ----

    def made(self) -> Made:
        """Return the function's result, checked.

        Raises:
            BadInput: it is not a module, a mapping of tensors of one length, and a function.
        """
        import torch

        with users_code(self.model):
            found = type(self).function()
        hint = "return (module, batch, loss): docs/tutorial/your-own-model.md"
        if not isinstance(found, tuple) or len(found) != 3:
            raise BadInput(f"model {self.model}: it returned {type(found).__name__}; {hint}")
        module, batch, loss = found
        tensors = isinstance(batch, Mapping) and all(map(torch.is_tensor, batch.values()))
        right = isinstance(module, torch.nn.Module) and tensors and batch and callable(loss)
        if not right:
            kinds = ", ".join(type(part).__name__ for part in found)
            raise BadInput(f"model {self.model}: it returned ({kinds}); {hint}")
        if len({len(tensor) if tensor.ndim else 0 for tensor in batch.values()}) != 1:
            raise BadInput(f"model {self.model}: the tensors of its batch differ in length")
        return found

    def make(self) -> nn.Module:
        module, _, loss = self.made()
        _LOSSES[type(self)] = loss
        return module

    # ---- facts ----

    @property
    def survey(self) -> Survey:
        return _measured(type(self), self.model).survey  # type: ignore[arg-type]  # a class is hashable

    # ---- modules ----

    def groups(self, module: nn.Module) -> list[Sequence[nn.Module]]:
        return blocks_of(module)

    # ---- samples and loss ----

    def samples(self) -> dict[str, Tensor]:
        import torch

        # What the function draws, and dropout later on, are alike on all ranks and in each run.
        torch.manual_seed(0)
        first, *others = self.made()[1].items()
        return {"x": first[1].cpu(), **{name: tensor.cpu() for name, tensor in others}}

    def example(self, device: torch.device | str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        import torch

        (_, x), *others = self.made()[1].items()
        given = {name: tensor[:1].to(device) for name, tensor in others}
        return x[:1].to(device), torch.zeros(1, device=device), given

    def predict(self, model: Any, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]) -> Any:
        names = _measured(type(self), self.model).names  # type: ignore[arg-type]  # a class is hashable
        batch = {names[0]: x, **{name: conditions[name] for name in names[1:]}}
        with _no_exit(self.model):
            return _LOSSES[type(self)](model, batch)


def blocks_of(module: nn.Module) -> list[Sequence[nn.Module]]:
    """Return the blocks: each outermost list of at least two modules of one class with a tenth of
    the parameters.

    Without such a list, the module's children are the blocks of one group.
    """
    from torch import nn

    lists = [(n, part) for n, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    least, found, taken = _count(module) / 10, list[Sequence[nn.Module]](), tuple[str, ...]()
    for name, part in lists:
        alike = len(part) > 1 and len({type(item) for item in part}) == 1
        if alike and not name.startswith(taken) and _count(part) >= least:
            found.append(part)
            taken = (*taken, f"{name}.")
    return found or [[child for child in module.children() if _count(child)]]


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class _Measured(NamedTuple):
    """Facts of the function's module and example: names and number of its samples, a survey."""

    names: tuple[str, ...]
    samples: int
    survey: Survey


@functools.lru_cache(maxsize=16)
def _measured(kind: type[OwnModule], model: str) -> _Measured:
    """Return the facts, from fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    subject = kind(model=model, data=DataFacts(1, 1, 1, 1), objective="own")
    with FakeTensorMode(allow_non_fake_inputs=True), users_code(model):
        module, batch, loss = subject.made()
        one = {name: tensor[:1] for name, tensor in batch.items()}
        with _no_exit(model):
            found = survey.of(subject, module, lambda: loss(module, one))
    return _Measured(tuple(batch), len(next(iter(batch.values()))), found)


_LOSSES: dict[type[OwnModule], Callable[..., Any]] = {}
"""Losses of the trained modules; a loss may close over its module's tensors."""


# ---- loading from a file ----


def is_file(model: str) -> bool:
    """Return whether a model's name is that of a file."""
    return model.partition(":")[0].endswith(".py")


def identity(model: str) -> str:
    """Return a hash of the file that ``model`` names, and of what its code has imported or read.

    Empty if it names none. The module must have been made and run once, as ``resolve`` does.
    """
    if not is_file(model):
        return ""
    hasher = hashlib.sha256(_path(model).read_bytes())
    for path in sorted(_OPENED.get(str(_path(model)), set()) - {str(_path(model).absolute())}):
        with contextlib.suppress(OSError):
            hasher.update(f"{path} {opened.digest(path)}".encode())
    return hasher.hexdigest()[:16]


@functools.lru_cache(maxsize=8)
def load(model: str) -> type[Subject]:
    """Return the class ``FILE.py:CLASS``, or a class for the results of ``FILE.py:FUNCTION``.

    Raises:
        BadInput: there is no such file or name, it cannot be imported, or it is neither a Subject
            nor a function.
    """
    path, name = _path(model), model.partition(":")[2]
    try:
        there = path.is_file()
    except OSError as error:  # a name of thousands of characters
        raise BadInput(f"model {model:.80}: {error.strerror}; write FILE.py:CLASS") from None
    if not there:
        raise BadInput(f"model {model}: no file {path}; write FILE.py:CLASS")
    kind = getattr(_module(model, path), name, None)
    if callable(kind) and not isinstance(kind, type):
        return type(name, (OwnModule,), {"function": staticmethod(kind), "__module__": __name__})
    if not (isinstance(kind, type) and issubclass(kind, Subject)):
        raise BadInput(
            f"model {model}: {name!r} in {path} is no strategies.subject.Subject; "
            "write FILE.py:CLASS (docs/adding/model.md)"
        )
    return kind


def _path(model: str) -> Path:
    return Path(model.partition(":")[0])


def _module(model: str, path: Path) -> Any:
    name = f"headroom_subject_{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module here
    beside = str(path.absolute().parent)
    if beside not in sys.path:
        sys.path.append(beside)  # last: a helper beside the file never replaces a package
    try:
        with users_code(model):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
