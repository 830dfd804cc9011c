"""Suites: what is compared, as files, as rows and as runs."""
