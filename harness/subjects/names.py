"""Suggestions for a model's name that is unknown. Imports no torch."""

from __future__ import annotations

import difflib
import re

from harness import RUN
from harness.subjects.library import families

LIST = f"{RUN} list models shows what there is"
OTHERS = f"any other transformer of diffusers: --model {families.PREFIX}CLASS --config config.json"
UNET = r"sdxl|sd(xl|v?1|v?2)|stablediffusion(xl|v?1|v?2)|unet|kolors|playground|pony|illustrious"
"""Models with a UNet, by letters and digits from the name's start."""
RELATED = {
    r"flux1?kontext": "its transformer is flux-dev's, and a step has the reference image's tokens "
    "too: take flux-dev at twice the pixels",
    r"wan22(t2v)?a?14b": "each of its two experts has wan2.1-14b's layers, and one trains at a "
    "time: take wan2.1-14b",
    r"anima($|base|preview|turbo)|cosmospredict2": "its class, CosmosTransformer3DModel, resizes a "
    "mask by torchvision, which is no dependency here, so it cannot be planned; the nearest in "
    "size is sana-1.6b, of 1.6 billion elements where it has 2",
    r"hidreame1": "it edits images by hidream-i1's layers: take hidream-i1 at twice the pixels",
    r"dit$": "did you mean DiT-XL/2?",
    r"sitx?[a-z]*\d": "it is DiT's network with another objective: take DiT-XL/2",
}
"""Beginning of a name, as letters and digits -> which model here plans it."""
SIZE = re.compile(r"(\d+(?:\.\d+)?)b(?![a-z])")
"""A number of parameters in billions, in a name in lower case."""
LIKE = 0.84
"""Least likeness of two spellings of one name (``difflib``)."""
SIZES = 0.15
"""Relative difference allowed between a size in a name and a model's parameters."""


def related(model: str) -> str:
    """Return why ``model`` is not here and what is the nearest, if that is known; else ""."""
    words = (families.letters(families.tail(model)), families.letters(model))
    return next((told for pattern, told in RELATED.items()
                 if any(re.match(pattern, word) for word in words)), "")  # fmt: skip


def suggestion(model: str) -> str:
    """Return what to write instead of ``model``, which no model has as its name.

    "did you mean" suggests other spellings only. A model that is merely related is called so.
    """
    word, known = families.letters(families.tail(model)), families.spellings()
    by_class = {families.letters(name): name for name in families.FAMILIES}
    if word in by_class:
        return f"did you mean {families.PREFIX}{by_class[word]}?"
    if re.match(UNET, word):
        return "it is a UNet, and only transformers are planned here"
    if told := related(model):
        return told
    if not word:
        return LIST
    meant = [name for spelt, name in known.items() if spelt.startswith(word)]
    if not meant:  # a typing error, but not in a number
        digits = re.findall(r"\d", word)
        alike = [spelt for spelt in known if re.findall(r"\d", spelt) == digits]
        meant = [known[one] for one in difflib.get_close_matches(word, alike, 1, LIKE)]
    if found := _of_size(meant, model):
        return f"did you mean {' or '.join(found)}?"
    kind = _kind(families.tail(model).lower())
    kin = [name for name in families.table() if _kind(name) == kind]
    found = _of_size(kin, model) or kin
    return f"of its kind there is {' and '.join(found)}; {OTHERS}" if found else f"{LIST}; {OTHERS}"


def _kind(name: str) -> str:
    """Return the letters at the beginning of a name."""
    return re.split("[^a-z]", name)[0]


def _of_size(names: list[str], model: str) -> list[str]:
    """Return each of the names once, in the order of the table; if ``model`` has a size in its
    name, those of that size."""
    known, size = families.table(), SIZE.search(model.lower())
    wanted = float(size[1]) * 1e9 if size else 0
    return [
        name
        for name, row in known.items()
        if name in names and (not wanted or abs(row.parameters["built"] / wanted - 1) < SIZES)
    ]
