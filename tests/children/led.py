"""A leader inside a Slurm job, with ``tests.children.steps`` in the place of a training:
``python -m tests.children.led FOLDER [STEPS]``. Leaves how the row ended in FOLDER/outcome.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from harness.launch.outcome import Facts
from harness.nodes.allocation import find
from harness.nodes.launch import node_facts
from harness.nodes.launched import Launched, make_order, start
from harness.nodes.outcome import classify_nodes
from harness.nodes.place import Steps
from harness.spec import Spec
from harness.system import process


def main() -> None:
    out = Path(sys.argv[1])
    here = find(os.environ, 2)
    assert here.by_steps and here.rank == 0
    place = Steps(nodes=2, head=here.head, silence=8.0, job=os.environ["SLURM_JOB_ID"], cpus=2)
    words = [sys.executable, "-m", "tests.children.steps", "$NODE_RANK", "$HEAD", "$PORT"]
    order = make_order(
        place, out, words=words + sys.argv[2:], environment={"CUDA_VISIBLE_DEVICES": ""},
        processes=1, timeout=200.0,
    )  # fmt: skip
    folder, stopped = out / "launch", None
    try:
        seen, _ = start(order, folder, place)
    except process.Interrupted:
        stopped, seen = "interrupted", Launched(order, folder, lambda status: None)
        seen.look()
    ends = seen.ends(seconds=4.0)
    nodes = node_facts(Spec(recipe="zero2", processes=2, nodes=2), seen, ends)
    whole = Facts(
        stopped=stopped,
        failures=tuple(f for node in nodes for f in node.facts.failures),
        statuses=tuple(s for node in nodes for s in node.facts.statuses),
        log="\n".join(node.facts.log for node in nodes),
    )
    status, reason, _ = classify_nodes(whole, nodes, place.said(folder), place.silence)
    told = {"status": status.value, "reason": reason, "hosts": [node.host for node in nodes]}
    told["ends"] = [end and end.exit_code for end in ends.values()]
    (out / "outcome.new").write_text(json.dumps(told))
    (out / "outcome.new").replace(out / "outcome.json")


main()
