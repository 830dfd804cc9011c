"""Hook of mkdocs: links to a published report lead to its HTML page, which the site has."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with report.html in place of report.md below results."""
    return re.sub(r"(\]\([\w./-]*results/[\w./-]+/report)\.md\)", r"\1.html)", markdown)
