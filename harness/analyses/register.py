"""Analyses that a suite can name as its ``story``, and their tables.

A new analysis is a module here and one line of ``ANALYSES``.
"""

from harness.extensions import Analysis

ANALYSES = {
    "claims": Analysis(
        "harness.analyses.claims:tables",
        charts="harness.analyses.charts:of_claims",
        lines="harness.analyses.charts:sweep_lines",
        of_a_step=True,
    ),
    "each": Analysis("harness.analyses.suites:each_tables", of_a_step=True),
    "ladder": Analysis("harness.analyses.suites:ladder", of_a_step=True),
    "fast_dit": Analysis("harness.analyses.suites:fast_dit_tables"),
    "depth": Analysis(
        "harness.analyses.suites:tables",
        charts="harness.analyses.charts:of_depth",
        lines="harness.analyses.suites:series",
    ),
    "quality": Analysis("harness.analyses.samples:tables"),
    "sampled": Analysis("harness.analyses.samples:sampled_tables"),
    "long": Analysis("harness.analyses.suites:long_tables"),
    "scale": Analysis(
        "harness.analyses.scale:tables",
        charts="harness.analyses.charts:of_scale",
        lines="harness.analyses.charts:scaling_recipes",
    ),
    "vocabulary": Analysis("harness.analyses.suites:vocabulary_tables", of_a_step=True),
}
