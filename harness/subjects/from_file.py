"""Subjects from files of one's own: ``my_model.py:Mine``, ``my_model.py:make``."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from harness.subjects.own_module import OwnModule, users_code
from strategies.base import BadInput
from strategies.subject import Subject

__all__ = ["identity", "is_file", "load"]


def is_file(model: str) -> bool:
    """Whether a model's name names a file."""
    return model.partition(":")[0].endswith(".py")


def identity(model: str) -> str:
    """A hash of the file that ``model`` names; empty where it names none."""
    if not is_file(model):
        return ""
    return hashlib.sha256(_path(model).read_bytes()).hexdigest()[:16]


@functools.lru_cache(maxsize=8)
def load(model: str) -> type[Subject]:
    """The class that ``FILE.py:CLASS`` names, or one for what ``FILE.py:FUNCTION`` makes.

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
            "write FILE.py:CLASS (docs/adding/subject.md)"
        )
    return kind


def _path(model: str) -> Path:
    return Path(model.partition(":")[0])


def _module(model: str, path: Path) -> Any:
    name = f"headroom_subject_{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up here
    try:
        with users_code(model):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
