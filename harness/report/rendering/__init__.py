"""How a report is shown: terminal, Markdown, HTML, CSV, JSON, and drawings in SVG."""
