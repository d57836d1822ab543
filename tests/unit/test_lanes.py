from __future__ import annotations

import os
import subprocess
import sys
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlalchemy_relaybus.lanes import LANES, lane_of, lane_of_event


def fnv1a_32(data: bytes) -> int:
    state = 0x811C9DC5
    for byte in data:
        state = (state ^ byte) * 0x01000193 % 2**32
    return state


@pytest.mark.parametrize(
    ("text", "digest"),
    # vectors of the FNV reference distribution (draft-eastlake-fnv, appendix C)
    [("", 0x811C9DC5), ("a", 0xE40C292C), ("b", 0xE70C2DE5), ("foobar", 0xBF9CF968)],
)
def test_known_vectors(text: str, digest: int) -> None:
    assert fnv1a_32(text.encode()) == digest
    assert lane_of(text) == digest % LANES


@given(st.text())
def test_is_the_whole_hash_modulo_256(key: str) -> None:
    assert lane_of(key) == fnv1a_32(key.encode("utf-8")) % 256


@given(st.uuids())
def test_an_event_goes_by_the_text_of_its_id(id: UUID) -> None:
    assert lane_of_event(id) == fnv1a_32(str(id).encode()) % 256


def test_a_lone_surrogate_has_no_lane() -> None:
    with pytest.raises(UnicodeEncodeError):
        lane_of("\ud800")


def test_every_lane_is_used() -> None:
    lanes = [lane_of(f"customer-{n}") for n in range(25_600)]
    counts = [lanes.count(lane) for lane in range(LANES)]
    assert set(lanes) == set(range(LANES))
    assert max(counts) < 200


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_does_not_depend_on_the_hash_seed(seed: str) -> None:
    program = (
        "from uuid import UUID; from sqlalchemy_relaybus.lanes import *;"
        "print(hash('customer-42'), lane_of('customer-42'), lane_of('schlüssel'),"
        "lane_of_event(UUID('018f3f5e-7b1a-7c3d-9e2f-001122334455')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [int(n) for n in done.stdout.split()[1:]] == [
        fnv1a_32(text.encode()) % 256
        for text in ("customer-42", "schlüssel", "018f3f5e-7b1a-7c3d-9e2f-001122334455")
    ]
