"""Formats of a report: terminal, Markdown, HTML, CSV, JSON, and charts in SVG."""
