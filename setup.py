"""Refuse to build a package: Headroom is run from its sources.

Launch files, documents and results lie beside the code, and the top-level names ``harness`` and
``strategies`` would collide in site-packages. The pins are in ``pyproject.toml``.
"""

raise SystemExit(
    "headroom is no package: it is run from its sources, whose launch files lie beside the code. "
    "Clone the repository and type ./run.sh there; it makes its environment by itself."
)
