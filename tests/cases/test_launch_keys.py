"""The table of launch files' keys is current, and each key of it is checked as its library does."""

from __future__ import annotations

import json
import subprocess
import sys

from harness import ROOT
from strategies.launch_keys import PATH


def test_the_table_is_what_the_libraries_classes_say():
    code = "import json; from docs.make.launch_keys import made; print(json.dumps(made()))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    found = json.loads(run.stdout.splitlines()[-1])
    assert found == json.loads(PATH.read_text()), "run python -m docs.make.launch_keys"
