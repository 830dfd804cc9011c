"""What was trained, with the size of a sample where one was asked for."""

from __future__ import annotations

from harness.spec import Spec

__all__ = ["model_in_words"]


def model_in_words(spec: Spec) -> str:
    """The model; its changed sizes, the pixels, frames and tokens of text, each where the spec
    names it: what it leaves open is the model's usual."""
    told = [
        f"{spec.resolution} pixels" if spec.resolution else "",
        f"{spec.frames} frames" if spec.frames else "",
        f"{spec.text} tokens of text" if spec.text else "",
    ]
    changed = f" with {spec.set}" if spec.set else ""
    size = ", ".join(filter(None, told))
    return f"{spec.model}{changed}" + (f" at {size}" if size else "")
