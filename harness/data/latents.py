"""Folders of latents in the layout of public DiT trainers: one .npy per sample, one per label.

Layout of fast-DiT: ``PATH/X_features/N.npy`` each [1, C, H, H], ``PATH/X_labels/N.npy`` each [1].
They are matched by file name: matching the two listings by position trains on wrong labels as soon
as one file is missing. Headers are read without numpy's loader, so a check of every file reads no
data. This module imports no torch, because the launching process checks folders too.
"""

from __future__ import annotations

import functools
import io
import math
import os
import tokenize
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strategies.base import BadInput
from strategies.files import open_foreign
from strategies.subject import DataFacts

CLASSES = 1000
READERS = 8
HEAD = 4096
"""Bytes that a check reads of each file; a header takes 128."""


@dataclass(frozen=True)
class Header:
    """Declaration of an .npy file: ``order`` is "C" or "F"; the data begin at byte ``start``."""

    shape: tuple[int, ...]
    dtype: np.dtype
    order: str
    start: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Folder:
    """A checked pair of folders, below ``path``; a BadInput names the faulty folder or file.

    ``thorough`` reads every file's header and every label; else only the first sample's.
    """

    def __init__(self, path: str, *, thorough: bool) -> None:
        self.features, self.labels = _pair_of_folders(Path(path).expanduser())
        self.names = _pair_of_listings(self.features, self.labels)
        self.header, _ = _header(self.features / self.names[0])
        shape = self.header.shape
        plain = len(shape) == 3 or (len(shape) == 4 and shape[0] == 1)
        square = plain and shape[-1] == shape[-2] and 0 not in shape
        if not square or self.header.dtype.kind != "f":
            first = self.features / self.names[0]
            raise BadInput(f"{first} holds {self.header}; a latent is float [1, C, H, H]")
        for name in self.names if thorough else self.names[:1]:
            self._check_header(name)
            self._label(name)
        channels, side, _ = shape[-3:]
        self.facts = DataFacts(len(self.names), channels, side, CLASSES)

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return latents float32 [n, C, H, H] and labels int64 [n] of the samples at ``indices``.

        Raises:
            BadInput: a file is damaged, of another shape, not finite, or of no class.
        """
        names = [self.names[i] for i in indices]
        latents = np.empty((len(names), *self.facts.sample_shape), np.float32)
        labels = np.empty(len(names), np.int64)

        def read_one(place: int) -> None:
            latents[place] = self._latent(names[place])
            labels[place] = self._label(names[place])

        with ThreadPoolExecutor(READERS) as readers:
            list(readers.map(read_one, range(len(names))))
        return latents, labels

    def _latent(self, name: str) -> np.ndarray:
        path = self.features / name
        header = self._check_header(name)
        flat = np.fromfile(path, header.dtype, math.prod(header.shape), offset=header.start)
        order: Any = header.order
        values = flat.reshape(header.shape, order=order).reshape(self.facts.sample_shape)
        if not np.isfinite(values).all():
            raise BadInput(f"{path} holds values that are not finite; extract it again")
        return values

    def _label(self, name: str) -> int:
        path = self.labels / name
        header, head = _header(path)
        if math.prod(header.shape) != 1 or header.dtype.kind not in "iu":
            raise BadInput(f"{path} holds {header}; a label is one integer")
        label = int(np.frombuffer(head, header.dtype, 1, header.start)[0])
        if not 0 <= label < CLASSES:
            raise BadInput(f"{path} holds label {label}; classes are 0 to {CLASSES - 1}")
        return label

    def _check_header(self, name: str) -> Header:
        path = self.features / name
        header, _ = _header(path)
        if header.shape != self.header.shape or header.dtype.kind != "f":
            raise BadInput(
                f"{path} holds {header} where {self.names[0]} holds {self.header}; "
                "extract all files alike"
            )
        return header


def _pair_of_folders(root: Path) -> tuple[Path, Path]:
    hint = "it should hold imagenet256_features/ and imagenet256_labels/"
    if not root.is_dir():
        raise BadInput(f"no folder {root}; {hint}")
    pairs = [
        (features, labels)
        for features in sorted(root.glob("*_features"))
        if (labels := root / f"{features.name.removesuffix('_features')}_labels").is_dir()
    ]
    if not pairs:
        raise BadInput(f"{root} has no pair of folders *_features and *_labels; {hint}")
    if len(pairs) > 1:
        names = ", ".join(features.name for features, _ in pairs)
        raise BadInput(f"{root} has more than one pair ({names}); keep one pair in a folder")
    return pairs[0]


def _pair_of_listings(features: Path, labels: Path) -> list[str]:
    ours, theirs = (
        {name for name in os.listdir(folder) if name.endswith(".npy")}
        for folder in (features, labels)
    )
    for folder, missing in ((labels, ours - theirs), (features, theirs - ours)):
        if missing:
            first = min(missing, key=_number)
            raise BadInput(
                f"{folder / first} is missing: {features.name} has {len(ours)} files, "
                f"{labels.name} {len(theirs)}; extract it again, or delete its partner"
            )
    if not ours:
        raise BadInput(f"{features} has no .npy file; extract latents into it first")
    return sorted(ours, key=_number)


def _number(name: str) -> tuple[float, str]:
    """Return a sort key: 2.npy before 10.npy, names that are not numbers last."""
    stem = name.removesuffix(".npy")
    return (int(stem) if stem.isdecimal() else float("inf"), name)


@functools.lru_cache(maxsize=64)
def _parse(header: bytes) -> Header:
    """Parse the header of an .npy file, once for the files of a folder with the same header."""
    file = io.BytesIO(header)
    new = np.lib.format.read_magic(file) > (1, 0)
    read = np.lib.format.read_array_header_2_0 if new else np.lib.format.read_array_header_1_0
    shape, fortran, dtype = read(file)
    return Header(shape, dtype, "F" if fortran else "C", file.tell())


def _header(path: Path) -> tuple[Header, bytes]:
    """Return an .npy file's header and its first bytes; check that the file is complete."""
    try:
        with open_foreign(path) as file:
            head, size = file.read(HEAD), os.fstat(file.fileno()).st_size
        prefix, width = (10, 2) if head[6:7] == b"\x01" else (12, 4)
        end = prefix + int.from_bytes(head[8 : 8 + width], "little")
        header = _parse(head[:end])
    except (OSError, ValueError, KeyError, SyntaxError, tokenize.TokenError) as fault:
        reason = " ".join(str(fault).split())
        raise BadInput(f"{path} is not a readable .npy file ({reason})") from fault
    needed = header.start + math.prod(header.shape) * header.dtype.itemsize
    if header.dtype.hasobject or size < needed:
        short = f"has {size} of {needed} bytes"
        damage = "holds Python objects" if header.dtype.hasobject else short
        raise BadInput(f"{path} {damage}; extract it again")
    return header, head
