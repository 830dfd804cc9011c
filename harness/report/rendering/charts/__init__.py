"""The charts of a report, drawn in SVG: no library, no network."""
