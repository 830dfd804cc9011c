"""The files of an anatomy: its page, and each chart as a drawing that stands alone. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from harness.memory.portrait import Portrait
from harness.report.anatomy import charts, laws, page
from harness.report.rendering.charts.svg import element, text
from harness.report.rendering.html_parts import STYLE

__all__ = ["charts_of", "standalone", "write"]

FONT = 'font-family="system-ui, Segoe UI, Roboto, Arial, sans-serif"'
TOP = 46.0
"""Height above a drawing for its title and the key to its colours."""
Keys = list[tuple[str, str]]
"""Name and colour of each entry of a legend."""


def write(portrait: Portrait, folder: Path) -> list[Path]:
    """Write the page and the charts; the paths written."""
    texts = {"anatomy.html": page.render(portrait), **charts_of(portrait)}
    for name, content in texts.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in texts]


def charts_of(portrait: Portrait) -> dict[str, str]:
    """File name -> SVG of each chart, with its title, its key and its colours inside."""
    pictures: dict[str, tuple[str, Keys]] = {
        "timeline.svg": (charts.timeline(portrait.timeline), charts.keys()),
        "inference.svg": (charts.bars(portrait), charts.keys()),
        "roofline.svg": (charts.roofline(portrait), charts.phase_keys()),
    }
    if portrait.points:  # a DiT's, for which laws are known
        pictures["six_nd.svg"] = (charts.preset_chart(), charts.family_keys())
        law = laws.fit(portrait.points)
        for varies in charts.SWEEPS:
            pictures[f"activations_{varies}.svg"] = (charts.sweep(portrait.points, varies, law), [])
    return {
        name: standalone(picture, keys) for name, (picture, keys) in pictures.items() if picture
    }


def standalone(picture: str, keys: Keys) -> str:
    """A drawing as a file of its own: no style sheet and no legend stand beside it there."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture)
    title = re.search(r"<title>(.*?)</title>", picture)
    width, height = float(box[1]), float(box[2])
    top = TOP if keys else TOP / 2
    heading = f'<text x="4" y="16" font-size="14" font-weight="600">{title[1]}</text>'
    inner = picture.replace("<svg ", f'<svg y="{top:g}" width="{width:g}" height="{height:g}" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height + top:g}" '
        f'width="{width:g}" height="{height + top:g}" font-size="11" {FONT}>'
        f"<style>{_style(picture)}</style>"
        f'<rect width="{width:g}" height="{height + top:g}" fill="#fff"/>'
        f"{heading}{_legend(keys)}{inner}</svg>\n"
    )


def _legend(keys: Keys) -> str:
    parts, left = [], 4.0
    for name, colour in keys:
        parts.append(element("rect", x=left, y=26, width=11, height=11, fill=colour))
        parts.append(text(left + 16, 35, name, class_="axis"))
        left += 34 + 6.2 * len(name)
    return "".join(parts)


def _style(picture: str) -> str:
    """The rules of the page that the drawing uses, with the page's colours written out."""
    sheet = STYLE.read_text(encoding="utf-8") + page.MORE_STYLE
    colours = dict(re.findall(r"(--[a-z]+): *(#[0-9a-f]+)", sheet))
    words = " ".join(re.findall(r'class="([^"]+)"', picture)).split()
    used = {f".{word}" for word in [*words, "axis"]}
    rules = []
    for selector, body in re.findall(r"([^{}@]+)\{([^{}]*)\}", sheet):
        names = {name.strip() for name in selector.split(",")}
        if names == {"svg text"} or any(set(re.findall(r"\.[\w-]+", n)) & used for n in names):
            rules.append(f"{selector.strip()}{{{' '.join(body.split())}}}")
    return re.sub(r"var\((--[a-z]+)\)", lambda match: colours[match[1]], "".join(rules))
