"""Names that people type for a strategy: other spellings, and hints for names that have no single
meaning here.

Names are in lower case, with ``_`` for ``-``, ``.`` and ``=``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from strategies.files import own_table

RUN = "./run.sh" if Path(__file__).resolve().parents[1].joinpath("run.sh").is_file() else "headroom"
"""The command, as messages name it: that of a clone, or of an installed package."""
TABLE = own_table(Path(__file__).with_name("absent.yaml"))


def _by_word(meanings: Mapping[str, str]) -> dict[str, str]:
    return {word: meaning for meaning, words in meanings.items() for word in words.split()}


SPELLED = _by_word(TABLE["spellings"])
"""Other name -> strategy of the same meaning, here or absent."""
MEANT = _by_word(TABLE["hints"])
"""Other name without a single meaning -> what to write instead."""

PLAIN = {"accumulate": "steps", "block_swap": "blocks", "lora": "rank", "checkpoint": "every"}
"""Strategy -> the parameter of a number that follows its name, as in ``grad_accum=4``."""
PARAMETERS = {"r": "rank", "dim": "rank", "network_dim": "rank", "lora_rank": "rank"}
"""Other name of a parameter -> its name, if the strategy has that one."""
CLOSE = 0.7
"""Least likeness of a word and a suggestion (``difflib``); below, they share only some letters."""


def plain(name: str) -> str:
    """Return a name in lower case, with ``_`` for ``-``, ``.`` and ``=``."""
    return re.sub(r"[-.=]", "_", name.lower())


def name_of(word: str, catalog: Mapping[str, Any]) -> str:
    """Return the strategy name in a recipe's word, in any spelling; an unknown name is returned as
    is."""
    name = word.partition(":")[0]
    small = plain(name)
    tried = (name, SPELLED.get(small, small), small.replace("_", ""))
    return next((one for one in tried if one in catalog), name)


def hint(word: str, catalog: Mapping[str, Any]) -> str:
    """Return what to write instead of an unknown strategy: its meaning here, or the closest name.

    A word as ``grad_accum=4`` is answered with the strategy and its parameter.
    """
    small = plain(word.partition(":")[0])
    if small in MEANT:
        return MEANT[small]
    name, _, number = re.sub(r"_steps(?=_)", "", small).rpartition("_")
    if number.isdigit() and (meant := name_of(name, catalog)) in PLAIN:
        return f"write {meant}:{PLAIN[meant]}={number}"
    close = difflib.get_close_matches(small, catalog, n=1, cutoff=CLOSE)
    return f"did you mean {close[0]!r}?" if close else f"{RUN} list shows what there is"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint with the known word closest to ``word``, else all of them."""
    known = sorted(known)
    small = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), small, n=1, cutoff=0.5)
    return f"did you mean {small[close[0]]!r}?" if close else f"known: {', '.join(known)}"
