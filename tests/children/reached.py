"""Modules of the project that a prediction loads: ``python -m tests.children.reached SPEC.json``.

Prints the prediction's method and, as JSON, the files of the project's own packages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness import ROOT
from harness.planner.worker import predict
from harness.resolve import resolve
from harness.spec import Spec

if __name__ == "__main__":
    found = predict(resolve(Spec(**json.loads(sys.argv[1]))))
    loaded = [Path(getattr(module, "__file__", None) or "/") for module in sys.modules.values()]
    print(found.method, found.reason)
    inside = [f.relative_to(ROOT) for f in loaded if f.is_relative_to(ROOT)]
    print(json.dumps([str(f) for f in inside if f.parts[0] in ("harness", "strategies")]))
