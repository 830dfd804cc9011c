"""Analyses that single suites add to the report: claims, depth, scale, ladder and others."""
