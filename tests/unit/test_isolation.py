"""Who may run beside whom, while it is being found out who kills workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection

from sqlalchemy_relaybus import Event, RelayBus
from sqlalchemy_relaybus.settings import Settings
from sqlalchemy_relaybus.stores.base import Delivery, Lease, Store, Suspect, Taken
from sqlalchemy_relaybus.worker.flight import Flight
from sqlalchemy_relaybus.worker.hold import Hold
from sqlalchemy_relaybus.worker.isolation import Isolation, is_culprit

ME = UUID(int=1)
CONNECTION = cast(Connection, object())


async def h(event: Event) -> None: ...


def flight() -> Flight:
    bus = RelayBus()
    bus.handler("step", name="h")(h)
    return Flight(bus.handlers, Settings())


def isolation(flight: Flight) -> Isolation:
    return Isolation(cast(Store, None), uuid4(), flight)


def hold(
    flight: Flight, lane: int, deliveries: Sequence[tuple[int, str | None, Suspect | None]]
) -> Hold:
    """A lane with *deliveries* claimed ahead, each as id, key and suspect."""
    suspects = {id: suspect for id, _, suspect in deliveries if suspect is not None}
    hold = Hold(Taken(Lease(lane, 1, 0), [], suspects), 0.0, 60.0)
    for id, key, _ in deliveries:
        delivery = Delivery(id, lane, 1, 0, 0, "h", key, None)
        delivery.hold = hold
        flight.prefetch(hold, delivery)
    return hold


@pytest.mark.parametrize(
    ("suspect", "proven"),
    [
        (None, False),
        (Suspect(1, 1), False),
        (Suspect(2, 1), False),  # it ran as everything does, and others may have begun since
        (Suspect(3, 2), False),
        (Suspect(3, 1), True),
        (Suspect(9, 1), True),
    ],
)
def test_the_culprit_is_who_was_alone_in_a_third_crash(
    suspect: Suspect | None, proven: bool
) -> None:
    assert is_culprit(suspect) is proven


def test_a_first_crash_isolates_nobody() -> None:
    f = flight()
    holds = [hold(f, 0, [(1, None, Suspect(1, 8)), (2, None, None)])]
    assert not isolation(f).wanted(holds)
    assert not isolation(f).expected(holds)


def test_half_as_many_run_as_in_the_last_crash_and_nobody_else() -> None:
    f = flight()
    suspects = [(id, None, Suspect(2, 8)) for id in range(10, 18)]
    holds = [hold(f, 0, [(1, None, None), *suspects[:5]]), hold(f, 1, suspects[5:])]
    assert isolation(f).wanted(holds)
    assert isolation(f).group(holds) == {10, 11, 12, 13}


def test_nobody_begins_while_anything_runs() -> None:
    f = flight()
    holds = [hold(f, 0, [(1, None, Suspect(2, 8))])]
    running = Delivery(5, 3, 1, 0, 0, "h", None, None)
    f.load.begin([running])
    assert isolation(f).wanted(holds)
    assert isolation(f).group(holds) == set()
    f.load.end(running)
    assert isolation(f).group(holds) == {1}


def test_it_goes_on_while_a_group_runs_and_ends_when_all_have_ended() -> None:
    f = flight()
    lane = hold(f, 0, [(1, None, Suspect(2, 2)), (2, None, None)])
    one = isolation(f)
    (running,) = f.promote(lane, one.group([lane]))
    assert running.id == 1
    assert one.wanted([lane])
    one.ended(running)
    assert not one.wanted([lane])


def test_what_comes_before_a_suspect_in_its_key_runs_in_its_stead() -> None:
    f = flight()
    lane = hold(
        f,
        0,
        [(1, "a", None), (2, "a", Suspect(2, 8)), (3, "a", Suspect(2, 8)), (4, "b", Suspect(2, 8))],
    )
    assert isolation(f).group([lane]) == {1, 4}


class FakeStore:
    """Notes what it is told; the reply to the next *lost* calls does not arrive."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[int]]] = []
        self.lost = 0

    def absolve(self, connection: object, holder: UUID, deliveries: Sequence[Delivery]) -> None:
        assert (connection, holder) == (CONNECTION, ME)
        self._note("absolve", deliveries)

    def survived(self, connection: object, deliveries: Sequence[Delivery]) -> None:
        assert connection is CONNECTION
        self._note("survived", deliveries)

    def _note(self, what: str, deliveries: Sequence[Delivery]) -> None:
        self.told.append((what, [each.id for each in deliveries]))
        if self.lost:
            self.lost -= 1
            raise ConnectionError


def test_those_that_ended_are_suspects_no_more_and_are_written_together() -> None:
    f, store = flight(), FakeStore()
    one = Isolation(cast(Store, store), ME, f)
    lane = hold(f, 0, [(1, None, Suspect(1, 2)), (2, None, Suspect(1, 2)), (3, None, None)])
    first, second, third = list(lane.prefetched)
    f.load.begin([second])
    one.ended(first)
    one.ended(third)  # never was one
    assert lane.suspects == {2: Suspect(1, 2)}
    one.absolve(CONNECTION, 100.0)
    one.ended(second)
    one.absolve(CONNECTION, 100.05)  # so soon, while something runs that may end as well
    assert store.told == [("absolve", [1])]
    one.absolve(CONNECTION, 100.1)
    one.absolve(CONNECTION, 101.0)
    assert store.told == [("absolve", [1]), ("absolve", [2])]


def test_nobody_is_waited_for_when_nothing_runs() -> None:
    f, store = flight(), FakeStore()
    one = Isolation(cast(Store, store), ME, f)
    lane = hold(f, 0, [(1, None, Suspect(1, 2)), (2, None, Suspect(1, 2))])
    for delivery in list(lane.prefetched):
        one.ended(delivery)
        one.absolve(CONNECTION, 100.0)
    assert store.told == [("absolve", [1]), ("absolve", [2])]


@pytest.mark.parametrize("what", ["absolve", "survived"])
def test_what_may_not_have_arrived_is_told_again(what: str) -> None:
    f, store = flight(), FakeStore()
    one = Isolation(cast(Store, store), ME, f)
    lane = hold(f, 0, [(1, None, Suspect(1, 2)), (2, None, None)])
    (delivery, _) = lane.prefetched
    if what == "absolve":
        one.ended(delivery)
    else:
        lane.started[1] = delivery
        one.lost(lane)
    store.lost = 1
    with pytest.raises(ConnectionError):
        one.absolve(CONNECTION, 100.0)
    one.absolve(CONNECTION, 200.0)
    one.absolve(CONNECTION, 300.0)
    assert store.told == [(what, [1])] * 2


suspects = st.one_of(st.none(), st.builds(Suspect, st.integers(1, 5), st.integers(1, 40)))
lanes = st.lists(
    st.lists(st.tuples(st.sampled_from([None, "a", "b"]), suspects), max_size=8), max_size=4
)


@given(lanes)
def test_a_group_is_never_larger_than_half_of_any_members_company(
    given: list[list[tuple[str | None, Suspect | None]]],
) -> None:
    f = flight()
    number = 0
    holds = []
    for n, content in enumerate(given):
        numbered: list[tuple[int, str | None, Suspect | None]] = []
        for key, suspect in content:
            number += 1
            numbered.append((number, None if key is None else f"{key}{n}", suspect))
        holds.append(hold(f, n, numbered))
    one = isolation(f)
    group = one.group(holds)
    assert bool(group) is one.wanted(holds)  # it never waits for nothing
    pairs: list[Any] = []
    for lane in holds:
        firsts: dict[str, int] = {}
        for delivery in lane.prefetched:
            first = (
                delivery.id
                if delivery.key is None
                else firsts.setdefault(delivery.key, delivery.id)
            )
            suspect = lane.suspects.get(delivery.id)
            if delivery.id in group:
                assert first == delivery.id
                pairs.append(delivery.key)
                if suspect is not None and suspect.crashes >= 2:
                    assert len(group) <= max(1, suspect.company // 2)
    keyed = [key for key in pairs if key is not None]
    assert len(keyed) == len(set(keyed))
