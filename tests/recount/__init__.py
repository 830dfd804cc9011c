"""The tables of README and docs, recounted from raw results by other code than that of the reports.

Nothing here imports from the harness, so that an error in its arithmetic cannot be repeated:
``raw`` reads ``runs/*/result.json`` with json, ``measures`` and ``versus`` have the definition of
each number as docs/reading-a-report.md states it, ``columns`` and ``stories`` say by its head
what each column holds, ``pages`` reads tables as printed, and ``check`` compares at the printed
precision. A column that is not known here is a mismatch: whoever adds one says here how it is
recounted.

    python -m tests.recount [FOLDER...]     every page of the repository, or result sets alone
"""
