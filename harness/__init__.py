"""Command line, worker, measurement and reports of Headroom."""

from pathlib import Path

__all__ = ["ROOT"]

ROOT = Path(__file__).resolve().parent.parent
"""The repository's root, the working directory of started processes."""
