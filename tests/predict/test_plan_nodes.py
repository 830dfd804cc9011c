"""A plan over several machines: whose link a collective takes, and how fast that is."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from harness.planner.plan.candidates import PlanError, asked_for, on_nodes
from harness.planner.plan.command import add_arguments as plan_arguments
from harness.planner.speed import rates
from harness.planner.speed.rates import COLLECTIVE
from harness.planner.speed.roofline import seconds, sent
from harness.prediction import Work
from harness.system.cards import find
from strategies.base import BadInput

CARD = find("A100-80GB")
SENT = [Work(phase="backward", kind="collective", dtype="", flops=0, bytes=10**9, count=1)]


def taken(gpus: int, nodes: int | None) -> float:
    return seconds(SENT, on_nodes(CARD, gpus, nodes), gpus).communication


def test_gpus_of_one_machine_do_not_take_the_network():
    near, far = (10**9 * 15 / 16 / rate for rate in (CARD.link_bandwidth, CARD.network_bandwidth))
    assert near < 0.9 * far
    assert taken(16, 1) == pytest.approx(near, rel=0.02)
    assert taken(16, 2) == taken(16, None) == taken(16, 16) == pytest.approx(far, rel=0.02)
    assert taken(4, 2) > taken(4, 1) == taken(4, None)


def test_gpus_that_nvlink_joins_beyond_a_machine_do_not_take_the_network():
    card = dataclasses.replace(find("GB200"), network_bandwidth=90e9)

    def bandwidth(gpus: int) -> float:
        step = seconds(SENT, card, gpus).communication
        return 10**9 * (gpus - 1) / gpus / (step - COLLECTIVE)

    assert (card.node, card.domain) == (4, 72)
    assert bandwidth(4) == pytest.approx(card.link_bandwidth, rel=0.02)
    assert bandwidth(72) == pytest.approx(card.link_bandwidth, rel=0.02)
    assert bandwidth(144) == pytest.approx(90e9, rel=0.02)
    assert card.host_bytes(72) == 4 * card.host_share, "memory is of a machine"


@pytest.mark.parametrize(
    ("gpus", "nodes", "words"), [(16, 3, "give --gpus 15"), (8, 0, "at least 1")]
)
def test_nodes_that_cannot_share_alike(gpus, nodes, words):
    with pytest.raises(PlanError, match=words):
        on_nodes(CARD, gpus, nodes)


def test_a_network_of_the_users_own_counts():
    for wrong in (0.0, -3.0, float("nan"), float("inf")):
        with pytest.raises(BadInput, match="give --network GB/s above 0"):
            rates.with_network(CARD, wrong)
    found = rates.with_network(CARD, 7.0)
    assert found.network_bandwidth == 7e9 and found.network_told == "as given"


def test_what_is_sent_within_a_node_goes_by_the_node_that_was_asked_for():
    bytes_sent = [sent(SENT, 16, on_nodes(CARD, 16, nodes).node) for nodes in (1, 2)]
    assert bytes_sent[0].across == bytes_sent[1].within == 0
    assert bytes_sent[0].within == bytes_sent[1].across > 0


@pytest.mark.parametrize("words", [["--nodes", "2"], ["--network", "25"]])
def test_a_plan_for_this_cpu_is_of_one_machine(words):
    parser = argparse.ArgumentParser()
    plan_arguments(parser)
    with pytest.raises(PlanError, match="--cpu is one machine without them; leave out both"):
        asked_for(parser.parse_args(["--cpu", "--recipes", "ddp", *words]))
