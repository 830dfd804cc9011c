"""An export in a terminal: what was written, what to fill in, and the line that starts it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from harness.commands.console import short
from harness.commands.planning.plan.answer import lacks, reach
from harness.export.bundle import PAGE, SCRIPT, Bundle
from harness.export.settling import YAML

if TYPE_CHECKING:
    from rich.console import Console

    from harness.export.trainers import Translation
    from harness.predict.verdict import Fit

__all__ = ["print_export"]

WHAT = {
    YAML: "accelerate's launch file",
    "deepspeed.json": "DeepSpeed's settings, every number settled",
    SCRIPT: "a small trainer that runs; the recipe's lines stand between >>> and <<<",
    PAGE: "the same in the options of other trainers",
}
CARRIED = "a module that train.py imports; copy it along"


def print_export(made: Bundle, fit: Fit | None, console: Console) -> None:
    """All of it; ``fit`` is what is known of the card, None where no card is meant."""
    console.print(Text(made.title, style="bold"))
    if fit is not None:
        console.print(_predicted(fit), highlight=False, style="dim")
    files = ((name, WHAT.get(name, CARRIED)) for name in made.files)
    _part(console, f"written to {short(made.folder)}", files)
    code = [(part.of, part.says) for part in made.lines if part.places]
    _part(console, f"lines of code in {SCRIPT}", code)
    _part(console, "no lines of code", ((p.of, p.why) for p in made.lines if not p.places))
    told = ((t.trainer["title"], _counted(t)) for t in made.translations)
    _part(console, f"other trainers in {PAGE}", told)
    _part(console, "to be filled in", made.blanks.items())
    moved = f"{YAML} names the other files by their folder: change that where you move them"
    if len({name for name in made.files if name.endswith((".yaml", ".json"))}) > 1:
        console.print(moved, style="dim", highlight=False)
    console.print(Text("\nstart it", style="bold"))
    console.print(Text(f"  {made.command}"), soft_wrap=True)


def _part(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """A title and a row a thing; nothing where there are none."""
    rows = list(rows)
    if not rows:
        return
    console.print(Text(f"\n{title}", style="bold"))
    if max(len(name) for name, _ in rows) > console.width // 2:
        for name, what in rows:  # a name that is folded cannot be searched for
            console.print(Text(f"  {name}"), soft_wrap=True)
            console.print(Text(f"    {what}"))
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for name, what in rows:
        grid.add_row(Text(f"  {name}"), Text(what))
    console.print(grid)


def _counted(made: Translation) -> str:
    missing = ", ".join(lack.what for lack in made.lacks)
    return f"{len(made.options)} options" + (f"; no counterpart: {missing}" if missing else "")


def _predicted(fit: Fit) -> str:
    """What a plan knows of this recipe on this card; where none was made, how to ask for one."""
    if fit.need_bytes is None:
        return f"whether it fits {fit.gpu.words} was not predicted: ./run.sh plan says"
    words = {"fits": "predicted to fit", "tight": "predicted to be tight on"}
    word = words.get(fit.verdict, "predicted NOT to fit")
    host = f", and {lacks(fit)}" if fit.verdict == "host" else ""
    return f"{word} {fit.gpu.words}: needs {reach(fit)}{host}"
