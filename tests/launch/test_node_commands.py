"""The command of a row on several nodes: for a supervisor, and for a person at a shell."""

from __future__ import annotations

import subprocess

import pytest

from harness import ROOT
from harness.launch import command
from harness.resolve import resolve
from harness.spec import Spec, SpecError
from harness.suite import matrix
from harness.suite.file import load_suite
from strategies import launch_file

SPEC = Spec(recipe="zero2", processes=4, nodes=2)


def test_a_node_gets_its_own_facts():
    facts = {command.RANK: "1", command.HEAD: "10.0.0.1", command.PORT: "29511"}
    words = command.as_node(command.command(resolve(SPEC), ROOT / "out", port=0), facts)
    place = words.index("--num_machines")
    assert words[place : place + 8] == [
        *("--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1"),
        *("--main_process_port", "29511"),
    ]
    assert words[words.index("--num_processes") + 1] == "4" and "--nodes" in words


def shell(line: str, **variables: str) -> subprocess.CompletedProcess:
    """``line`` in a shell in which ``env`` only prints its words."""
    return subprocess.run(
        ["bash", "-c", 'env() { printf "%s\\n" "$@"; }\n' + line],
        env={"PATH": "/bin:/usr/bin", **variables}, capture_output=True, text=True,
    )  # fmt: skip


def test_the_printed_line_runs_on_each_node_and_asks_for_what_it_lacks():
    line = command.display(resolve(SPEC), ROOT / "results" / "x")
    refused = shell(line)
    assert refused.returncode and "network interface to the other nodes" in refused.stderr
    refused = shell(line, IFNAME="eth0", ADDRESS="10.0.0.2")
    assert refused.returncode and "0 on the head" in refused.stderr
    own = {"IFNAME": "eth0", "ADDRESS": "10.0.0.2", "NODE_RANK": "1", "RDZV_CONF": "is_host=0"}
    words = shell(line, **own, HEAD="10.0.0.1").stdout.splitlines()
    facts = {command.RANK: "1", command.HEAD: "10.0.0.1", command.PORT: "29500"}
    facts |= {command.CONF: "is_host=0"}
    wanted = command.as_node(command.command(resolve(SPEC), ROOT / "results" / "x", port=0), facts)
    assert words[-len(wanted) :] == wanted and "GLOO_SOCKET_IFNAME=eth0" in words
    assert {"PET_LOCAL_ADDR=10.0.0.2", "PET_RDZV_ID=headroom"} <= {*words}


def test_no_launch_file_leaves_nodes_to_ssh():
    """accelerate hands DeepSpeed to pdsh on several machines unless its file says otherwise."""
    files = [launch_file.read(path) for path in launch_file.FOLDER.glob("*.yaml")]
    found = [file.content["deepspeed_config"] for file in files if file.kind == "DEEPSPEED"]
    assert found and {one["deepspeed_multinode_launcher"] for one in found} == {"standard"}


def test_variables_of_other_launchers_do_not_reach_accelerate(monkeypatch):
    monkeypatch.setenv("PET_NNODES", "7")  # torchrun would take it for its own option
    assert "PET_NNODES" not in command.inherited()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"processes": 3, "nodes": 2}, "give --processes 2 or 4"),
        ({"processes": 1, "nodes": 2}, "give --processes 2$"),
        ({"nodes": 0}, "nodes is 0"),
    ],
)
def test_processes_that_nodes_cannot_share_are_refused(given, words):
    with pytest.raises(SpecError, match=words):
        Spec(recipe="ddp", **given).check()


def test_a_row_of_one_process_stays_on_one_node(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text("cpu: {model: DiT-T/4, processes: 2}\nrecipes: [ddp, single]\n")
    rows = matrix.specs(load_suite(str(file), "cpu"), {"nodes": 2})
    assert [(row.recipe, row.processes, row.nodes) for row in rows] == [
        ("ddp", 2, 2), ("single", 1, 1),
    ]  # fmt: skip
