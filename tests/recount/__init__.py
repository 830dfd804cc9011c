"""The numbers of a report, recounted from raw results by code that the reports do not share.

The package imports nothing of the harness, so that an error in its arithmetic is not repeated here.
``raw`` reads runs/*/result.json. ``measures`` defines the numbers of a row alone, ``noise`` the
noise floor, ``same`` and ``drawn`` the distances from the reference, ``versus`` a row against
others, ``predicted`` the errors of predictions, ``answers`` the rows that a report names.
``numbers`` compares all of them with a report.json.

    python -m tests.recount FOLDER...     mismatches of each FOLDER's report.json, one a line
"""
