"""Weight files that a strategy reads: location, shapes, and a draw function for their tensors.

Only functions import torch.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.base import BadInput
from strategies.files import open_foreign
from strategies.words import RUN

if TYPE_CHECKING:
    from strategies.initial import Draw
    from strategies.subject import Subject


ROOT = Path(__file__).resolve().parents[2]
"""Folder to which a recipe's file names are relative."""
LONGEST = 100_000_000
"""Bytes of the largest header that safetensors accepts; other kinds of files may give any
number."""
SEED = 1
"""Seed of weights that no file has. It differs from a spec's usual one, which the student uses."""


def header(name: str) -> bytes:
    """Return the header of a safetensors file: names, shapes and types, without weights.

    Empty if there is no such file.
    """
    with contextlib.suppress(OSError, ValueError), open_foreign(ROOT / name) as file:
        return file.read(min(int.from_bytes(file.read(8), "little"), LONGEST))
    return b""


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors in a safetensors file, from its header.

    Raises:
        BadInput: there is no such file, or it is of another format.
    """
    from safetensors import SafetensorError, safe_open

    path = ROOT / name
    if not path.is_file():
        raise BadInput(
            f"there is no file {name}; train one ({RUN} train leaves averaged.safetensors), "
            "and name it in full or from the repository's root, without spaces, commas and "
            "plus signs"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise BadInput(f"{name} is no file of safetensors ({error}); train it anew") from None


def sized(model: Subject, name: str, depth: int, width: int, heads: int) -> Subject:
    """Return ``model`` in the given size, else in that of the file ``name``, else with twice its
    blocks.

    Raises:
        BadInput: there is no such file or size, or the sizes differ.
    """
    found = model.sizes_in(shapes(name)) if name else (0, 0)
    for word, asked, has in zip(("depth", "width"), (depth, width), found, strict=True):
        if asked and has and asked != has:
            raise BadInput(f"{word} is {asked}, and {name} has {has}; leave {word} out")
    usual = 0 if any(found) else 2 * model.depth
    return model.sized(depth or found[0] or usual, width or found[1], heads)


def weights(subject: Subject, name: str) -> Draw:
    """Return a draw function for ``subject``: float32 values from the file ``name``.

    Parameters that the file does not have (all, without a name) are drawn as usual.

    Raises:
        BadInput: when called, the file's tensor has another shape.
    """
    from strategies import initial

    drawn = subject.draws(SEED, "awake")
    if drawn is None:
        parameters = dict(initial.build(subject, SEED, "awake").named_parameters())
    state = _read(subject, name) if name and not initial.storageless() else {}
    names = frozenset(state)

    def draw(key: str, like: Any) -> Any:
        if key not in names:
            return drawn(key, like) if drawn else parameters[key].detach()
        value = state.pop(key).float()  # each is drawn once
        if value.shape != like.shape:
            raise BadInput(
                f"{key} in {name} has the shape {list(value.shape)}, and that of {subject.name} "
                f"has {list(like.shape)}; give its own depth, width and heads, and the --data and "
                "--objective that it was trained with"
            )
        return value

    return draw


def _read(subject: Subject, name: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    from strategies import initial

    try:
        state = load_file(str(ROOT / name))
    except Exception as error:  # each format raises its own errors
        raise BadInput(f"{name} cannot be read: {error}; train it anew") from None
    with initial.valueless():
        known = {key for key, _ in subject.make().named_parameters()}
    odd = sorted(state.keys() - known)
    if odd or not state:
        found = f"{odd[0]}, which {subject.name} has not" if odd else "no tensor"
        raise BadInput(f"{name} has {found}; give its own depth and width, and --model's family")
    return state
