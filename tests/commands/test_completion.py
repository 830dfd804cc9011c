"""Shell completion: what argcomplete's shell function reads from ``run.sh``."""

import os
import subprocess
import sys

import pytest

from harness import ROOT

pytestmark = pytest.mark.thorough

WORDS = {
    "run --rec": {"--recipes"},
    "max": {"max-batch"},
    "run --device c": {"cpu", "cuda"},
    "run --nosuch": set(),
}


@pytest.mark.parametrize("line", WORDS)
def test_a_shell_completes_names(line, tmp_path):
    """No set-up begins: the folder of the environment stays away."""
    told, line = tmp_path / "told", f"run.sh {line}"
    found = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    found |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(told), "HEADROOM_PYTHON": sys.executable}
    found |= {"HEADROOM_VENV": str(tmp_path / "venv"), "COMP_TYPE": "9"}
    told.touch()
    env = {**os.environ, **found, "IFS": "\n"}
    subprocess.run([ROOT / "run.sh"], env=env, cwd=tmp_path, check=False)
    words = set(told.read_text().replace("\013", "\n").split())
    wanted = WORDS[line.partition(" ")[2]]
    assert wanted <= words and bool(words) == bool(wanted)
    assert all(word.startswith(line.split()[-1]) for word in words)
    assert not (tmp_path / "venv").exists()
