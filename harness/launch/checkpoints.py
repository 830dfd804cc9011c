"""Checkpoints of a training: completeness, matching terms and ownership. Imports no torch."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.json_files import BadFile, read_json
from harness.resolve import Resolved
from harness.spec import Spec
from strategies.base import BadInput

DONE = "headroom.json"
"""Written last, with the sizes of all other files: a folder without it is a partial checkpoint."""
FREE = ("steps", "warmup", "repeat", "device", "recipe")
"""Spec fields that may change on resuming; the recipe is compared in its normal form."""
PLAIN = (".safetensors", DONE)
"""Suffixes of files that load without running code, so they need no signature."""


class Mismatch(BadInput):
    """The checkpoint is of a different training than the one to resume."""


class Foreign(BadInput):
    """The checkpoint is not proved to be the user's own, and loading it may run code."""


def terms(resolved: Resolved) -> dict[str, Any]:
    """Return the facts that a resumed training must keep, without its length and device."""
    fields = {k: v for k, v in resolved.spec.to_dict().items() if k not in FREE}
    return {"recipe": str(resolved.recipe), **fields}


def sizes(path: Path) -> dict[str, int]:
    """Return name -> bytes of every file of the checkpoint at ``path`` except ``DONE``."""
    files = (p for p in sorted(path.rglob("*")) if p.is_file() and p.name != DONE)
    return {str(p.relative_to(path)): p.stat().st_size for p in files}


def finished(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder`` that were completely written, the newest last."""
    return sorted(path.parent for path in folder.glob(f"step-[0-9]*[0-9]/{DONE}"))


def facts_of(path: Path) -> dict[str, Any]:
    """Return the facts saved with a checkpoint; a ValueError says why they cannot be read."""
    try:
        return read_json(path / DONE, dict[str, Any])
    except BadFile as error:
        raise ValueError(f"{DONE} is not readable ({error})") from None


def fault(path: Path) -> str:
    """Return why the checkpoint at ``path`` is incomplete by its file sizes; empty if it is not."""
    try:
        wanted = facts_of(path).get("files", {})
    except ValueError as error:
        return str(error)
    found = sizes(path)
    for name, size in wanted.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != size:
            return f"{name} has {found[name]} of {size} bytes"
    return ""


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint, and a line for each newer one that is incomplete."""
    skipped: list[str] = []
    for path in reversed(finished(folder)):
        why = fault(path)
        if not why:
            return path, skipped
        skipped.append(f"{path.name} is incomplete: {why}")
    return None, skipped


def check_same(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's facts; a Mismatch names the first term that is not as ``wanted``."""
    facts = facts_of(path)
    usual = {f.name: f.default for f in dataclasses.fields(Spec)}
    for name, value in wanted.items():
        saved = facts.get(name, usual.get(name))  # a newer field than the checkpoint
        if saved != value:
            raise Mismatch(
                f"{path} was saved with {name} {saved}, not {value}; resume with the same, or "
                "start anew in another folder"
            )
    return facts


# ---- ownership ----


def proof(path: Path) -> dict[str, Any]:
    """Return the digests of the files whose load may run code, and their HMAC by the user's key.

    It is empty if the user has no folder to keep a key in (``_key``).
    """
    digests, key = _digests(path), _key()
    return {"digests": digests, "proof": _signature(key, digests) if key else ""}


def check_own(path: Path) -> None:
    """Check that this user wrote the checkpoint at ``path``, and that its files are unchanged.

    Raises:
        Foreign: another key signed it, or a file that may run code has changed.
    """
    signed, found = claims(path), _digests(path)
    for name, _ in sorted(signed.items() ^ found.items()):
        raise Foreign(f"{path}: {name} has changed since it was saved; {TRUST}")


TRUST = (
    "loading it may run code of its author; give --trust if you trust the author, or "
    "start in another --checkpoint DIR (SECURITY.md)"
)


def claims(path: Path) -> dict[str, str]:
    """Return the digests that this user signed, without reading the files.

    Raises:
        Foreign: they were not signed by this user's key.
    """
    facts, key = facts_of(path), _key(make=False)
    digests, signature = facts.get("digests"), facts.get("proof")
    if not key or not isinstance(digests, dict) or not isinstance(signature, str):
        raise Foreign(f"{path} was not saved by this user on this machine; {TRUST}")
    if not hmac.compare_digest(_signature(key, digests), signature):
        raise Foreign(f"{path} was saved by another user or on another machine; {TRUST}")
    return digests


def _signature(key: bytes, digests: Mapping[str, str]) -> str:
    content = json.dumps(digests, sort_keys=True).encode()
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def _digests(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each file at ``path`` whose load may run code, by name within it."""

    def digest(name: str) -> str:
        with (path / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    names = [name for name in sizes(path) if not name.endswith(PLAIN)]
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def _key(make: bool = True) -> bytes:
    """Return this user's key of 32 bytes, made at first use; empty if it cannot be stored."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    path = Path(config) / "headroom" / "checkpoint.key"
    with contextlib.suppress(OSError):
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Written beside and linked into place: two simultaneous starts get one key. Its mode
            # is 0600.
            with tempfile.NamedTemporaryFile(dir=path.parent) as file:
                file.write(secrets.token_bytes(32))
                file.flush()
                with contextlib.suppress(FileExistsError):
                    os.link(file.name, path)
        status = path.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return path.read_bytes()
    return b""
