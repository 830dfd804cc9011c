"""Runs recipes, measures them, and reports on them."""

from pathlib import Path

__all__ = ["ROOT"]

ROOT = Path(__file__).resolve().parent.parent
"""The repository's root: the folder that commands are started from."""
