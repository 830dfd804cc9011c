"""A plan over several machines: whose link a collective takes, and how fast that is."""

from __future__ import annotations

import dataclasses

import pytest

from harness.planner.plan.candidates import on_nodes
from harness.planner.speed import rates
from harness.planner.speed.rates import COLLECTIVE
from harness.planner.speed.roofline import seconds
from harness.prediction import Work
from harness.system.cards import find
from strategies.base import BadInput

CARD = find("A100-80GB")
KINDS = ("collective", "overlapped")
SENT = [Work(phase="backward", kind="collective", dtype="", flops=0, bytes=10**9, count=1)]


def busy(seconds_of_it: float) -> Work:
    """A product that keeps an MI300X for so long."""
    flops = int(seconds_of_it * 0.5 * 1307e12)
    return dataclasses.replace(SENT[0], kind="product", dtype="bfloat16", flops=flops)


def taken(gpus: int, nodes: int | None) -> float:
    return seconds(SENT, on_nodes(CARD, gpus, nodes), gpus).communication


def test_gpus_of_one_machine_do_not_take_the_network():
    near, far = (10**9 * 15 / 16 / rate for rate in (CARD.link_bandwidth, CARD.network_bandwidth))
    assert near < 0.9 * far
    assert taken(16, 1) == pytest.approx(near, rel=0.02)
    assert taken(16, 2) == taken(16, None) == pytest.approx(far, rel=0.02)
    assert taken(16, 2) < taken(16, 16) == pytest.approx(far, rel=0.03)
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


def test_a_collective_of_512_ranks_waits_for_each_of_them():
    """NCCL's model of a ring over 64 nodes of 8, by its source: 1.9 and 4 microseconds a rank."""
    card, little = find("MI300X"), [dataclasses.replace(SENT[0], bytes=8)]
    one = seconds(little, card, 8).communication
    assert one == pytest.approx(COLLECTIVE, rel=0.01)
    ring = seconds(little, card, 512).communication - one
    assert ring == pytest.approx(440 * 1.9e-6 + 64 * 4e-6, rel=0.01)
    gathers = [dataclasses.replace(SENT[0], bytes=3 * 10**8, count=100, kind=k) for k in KINDS]
    shown, hidden = (seconds([busy(10.0), each], card, 512).communication for each in gathers)
    assert hidden == 0 and shown > 0.15, "overlap is what the engine's launch file says"


def test_rings_of_ranks_that_are_a_node_apart_share_its_network():
    """HSDP on 8 nodes: eight rings, each of a share of the gradients, use the rails at once."""
    whole = dataclasses.replace(SENT[0], group=64)
    part = dataclasses.replace(SENT[0], group=8, stride=8, bytes=10**9 // 8)
    one, eight = (seconds([work], CARD, 64).communication for work in (whole, part))
    assert eight == pytest.approx(one, rel=0.15)
    within = dataclasses.replace(part, stride=1)
    assert seconds([within], CARD, 64).communication < 0.2 * eight


def test_a_network_of_the_users_own_counts():
    for wrong in (0.0, -3.0, float("nan"), float("inf")):
        with pytest.raises(BadInput, match="give --network GB/s above 0"):
            rates.with_network(CARD, wrong)
    found = rates.with_network(CARD, 7.0)
    assert found.network_bandwidth == 7e9 and found.network_told == "as given"
