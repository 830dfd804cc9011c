"""A suite on two nodes, two commands on this host, beside the same rows on one machine."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Case, launched_together

from harness import ROOT
from harness.launch import command, nodes
from harness.launch.command import free_port
from harness.resolve import resolve
from harness.result import Status, load_all
from harness.spec import Spec
from harness.suite import matrix
from harness.suite.file import load_suite
from harness.system.machine import recall
from strategies import launch_file
from tests.made.living import ranks, until

SPEC = Spec(recipe="ddp", model="DiT-T/8", global_batch=4, warmup=1, steps=2, processes=2)
WORDS = "run --recipes ddp single --model DiT-T/8 --global-batch 4 --warmup 1 --steps 2 "
WORDS += "--processes 2 --device cpu --noise-floor 1 --no-predictions --timeout 200 --out"


def started(out: Path, words: str = WORDS) -> list[subprocess.Popen]:
    """Both commands."""
    command = [sys.executable, "-m", "harness", *words.split(), str(out), "--nodes", "2"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    children = []
    for rank in (0, 1):
        with (out / f"said{rank}.txt").open("w") as said:
            own = [*command, "--node-rank", str(rank)]
            children.append(subprocess.Popen(own, cwd=ROOT, stdout=said, stderr=said))
    return children


@pytest.mark.thorough
def test_two_nodes_train_bit_for_bit_as_one_machine(tmp_path):
    children = started(tmp_path)
    alone = {"one": Case(SPEC, resident=True)}  # which takes the steps of any run
    one = launched_together(alone, tmp_path / "alone")["one"]
    codes = [child.wait(300) for child in children]
    said = [(tmp_path / f"said{rank}.txt").read_text() for rank in (0, 1)]
    assert codes == [0, 0], said
    nodes = [{r.spec.recipe: r for r in load_all(f)[0]} for f in (tmp_path, tmp_path / "node-1")]
    for rows in nodes:
        assert rows["single"].status is Status.OK and rows["single"].spec.nodes == 1
    two, other = (rows["ddp"] for rows in nodes)
    assert two.status is one.status is Status.OK, f"{two.reason} {one.reason}"
    assert two.spec.nodes == 2 and len(two.ranks) == 2 and two.ranks == other.ranks
    assert len(two.losses) > 4 and two.losses == other.losses == one.losses
    assert two.projections == other.projections == one.projections
    assert two.grad_norms == one.grad_norms
    peaks = [[rank.categories.total for rank in row.ranks] for row in (two, one)]
    assert peaks[0] == peaks[1]
    assert "On 2 nodes" in (tmp_path / "report.md").read_text()


@pytest.mark.thorough
def test_a_rank_that_dies_ends_the_row_on_both_nodes(tmp_path):
    words = WORDS.replace("ddp single", "ddp").replace("--steps 2", "--steps 4000")
    children = started(tmp_path, words.replace("--timeout 200", "--timeout 100"))
    far = tmp_path / "node-1"
    until(lambda: ranks(tmp_path) and ranks(far))
    (pid,) = ranks(far).values()
    os.kill(pid, signal.SIGKILL)
    assert [child.wait(200) for child in children] == [1, 1]
    near, lost = (load_all(folder)[0][0] for folder in (far, tmp_path))
    assert near.status is Status.FAILED and "killed by SIGKILL from outside" in near.reason
    assert lost.status is Status.NODE_LOST, lost.reason
    assert "another node stopped answering in phase measure, step" in lost.reason


def asked(**given) -> argparse.Namespace:
    usual = {"nodes": 2, "rdzv_endpoint": "127.0.0.1:29500", "node_rank": None, "dry_run": False}
    return argparse.Namespace(**{**usual, **given})


def test_a_node_finds_its_rank_and_its_interface():
    assert nodes.this_node(asked(nodes=1), {}) is None
    here = nodes.this_node(asked(), {})
    assert (here.rank, here.address, here.interface) == (0, "127.0.0.1", "lo")
    assert nodes.this_node(asked(), {"SLURM_NODEID": "1"}).rank == 1
    assert nodes.this_node(asked(node_rank=0), {"SLURM_NODEID": "1"}).rank == 0
    assert here.folder(Path("out")) == Path("out")
    assert nodes.this_node(asked(node_rank=1), {}).folder(Path("out")) == Path("out/node-1")


@pytest.mark.thorough
def test_a_node_alone_ends_with_a_row_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "JOIN_SECONDS", 1.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    node = nodes.Node(0, 2, "127.0.0.1", port, "127.0.0.1", "lo")
    spec = Spec(**{**SPEC.__dict__, "nodes": 2, "device": "cpu"})
    row = nodes.start_on(node, recall(tmp_path))(resolve(spec), tmp_path / "run", timeout=4.0)
    assert row.status is Status.NODE_LOST and "--fresh" in row.way_out
    assert row.reason == "not all 2 nodes joined this row within 5 s"


# ---- the command of a row on several nodes ----


ZERO2 = Spec(recipe="zero2", processes=4, nodes=2)


def test_a_node_gets_its_own_facts():
    facts = {command.RANK: "1", command.HEAD: "10.0.0.1", command.PORT: "29511"}
    words = command.as_node(command.command(resolve(ZERO2), ROOT / "out", port=0), facts)
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
    line = command.display(resolve(ZERO2), ROOT / "results" / "x")
    refused = shell(line)
    assert refused.returncode and "network interface to the other nodes" in refused.stderr
    refused = shell(line, IFNAME="eth0", ADDRESS="10.0.0.2")
    assert refused.returncode and "0 on the head" in refused.stderr
    own = {"IFNAME": "eth0", "ADDRESS": "10.0.0.2", "NODE_RANK": "1", "RDZV_CONF": "is_host=0"}
    words = shell(line, **own, HEAD="10.0.0.1").stdout.splitlines()
    facts = {command.RANK: "1", command.HEAD: "10.0.0.1", command.PORT: "29500"}
    facts |= {command.CONF: "is_host=0"}
    wanted = command.as_node(command.command(resolve(ZERO2), ROOT / "results" / "x", port=0), facts)
    assert words[-len(wanted) :] == wanted and "GLOO_SOCKET_IFNAME=eth0" in words
    assert {"PET_LOCAL_ADDR=10.0.0.2", "PET_RDZV_ID=headroom"} <= {*words}


def test_no_launch_file_leaves_nodes_to_ssh():
    """accelerate hands DeepSpeed to pdsh on several machines unless its file says otherwise."""
    files = [launch_file.read(path) for path in launch_file.FOLDER.glob("*.yaml")]
    found = [file.content["deepspeed_config"] for file in files if file.kind == "DEEPSPEED"]
    assert found and {one["deepspeed_multinode_launcher"] for one in found} == {"standard"}


def test_a_row_of_one_process_stays_on_one_node(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text("cpu: {model: DiT-T/4, processes: 2}\nrecipes: [ddp, single]\n")
    rows = matrix.specs(load_suite(str(file), "cpu"), {"nodes": 2})
    assert [(row.recipe, row.processes, row.nodes) for row in rows] == [
        ("ddp", 2, 2), ("single", 1, 1),
    ]  # fmt: skip
