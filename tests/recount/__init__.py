"""The tables of README and docs, recounted from raw results by other code than that of the reports.

Nothing here imports from the harness, so that an error in its arithmetic cannot be repeated:
``raw`` reads ``runs/*/result.json`` with json, ``measures`` (of a row alone), ``noise`` (the noise
floor), ``same`` (the five distances and their limits) and ``versus`` (a row against others) have
the definition of each number as docs/reading-a-report.md states it. ``columns``, ``effects``,
``answers``, ``sentences`` and ``stories`` (with ``claims``, ``sweeps``, ``growths``) say what each
cell and sentence holds, ``pages`` reads them as printed, and ``check`` compares at the printed
precision. A column that is not known here is a mismatch, and so is one that is due and not there:
whoever adds one says here how it is recounted.

    python -m tests.recount [FOLDER...]     every page of the repository, or result sets alone
"""
