"""Followers of a blocked key: set aside where claims do not read, and let go in order."""

from __future__ import annotations

import pytest
from sqlalchemy import select, update

from sqlalchemy_relaybus.stores.base import Delivery, Pair, ParkedStatus
from tests.support.stores import Bench, Holder, ids, key_on, new_event, parked

LANE = 7
KEY = key_on(LANE)
PAIR = Pair("a", KEY)


def behind(bench: Bench) -> list[int]:
    table = bench.tables.parked
    query = select(table.c.id).where(table.c.status == "behind").order_by(table.c.id)
    return [id for (id,) in bench.read(query)]


def let_go(
    holder: Holder, limit: int = 1000, *, everywhere: bool = False
) -> dict[tuple[int, Pair], int]:
    pairs = None if everywhere else {(LANE, PAIR)}
    return dict(holder.bench.store.let_go(holder.connection, pairs, limit))


def blocked(
    bench: Bench, followers: int, *, status: ParkedStatus = "retrying"
) -> tuple[Holder, Delivery]:
    """A holder of the lane, and the parked head of a key with *followers*."""
    holder = bench.holder("a")
    bench.publish(*(new_event(KEY, handlers=("a",)) for _ in range(1 + followers)))
    holder.take(LANE)
    [head] = holder.exchange(limit=1).startable
    delay = None if status == "dead" else 3600
    assert holder.park(parked(head, status, delay=delay)) == {head.id}
    return holder, head


def free(bench: Bench, head: Delivery) -> None:
    """Nothing is blocked by *head* any more."""
    table = bench.tables.parked
    with bench.engine.begin() as connection:
        connection.execute(update(table).where(table.c.id == head.id).values(blocks=False))


def test_all_but_a_few_are_set_aside_the_lowest_stay(bench: Bench) -> None:
    holder, _ = blocked(bench, 10)
    other = new_event(key_on(LANE, 1), handlers=("a",))
    bench.publish(other)
    before = bench.deliveries()
    assert holder.hold_back(beyond=3) == {(LANE, PAIR)}
    assert behind(bench) == before[3:10]
    assert bench.deliveries() == [*before[:3], before[10]]
    assert ids(holder.claim()) == [before[10]]


def test_no_more_are_looked_at_than_asked_for(bench: Bench) -> None:
    holder, _ = blocked(bench, 10)
    before = bench.deliveries()
    holder.hold_back(limit=4)
    assert behind(bench) == before[:4]


def test_what_waits_for_nothing_stays(bench: Bench) -> None:
    holder = bench.holder("a")
    bench.publish(*(new_event(KEY, handlers=("a",)) for _ in range(5)))
    holder.take(LANE)
    assert holder.hold_back() == set()
    assert len(bench.deliveries()) == 5


def test_a_row_that_somebody_has_locked_is_left_where_it_is(bench: Bench) -> None:
    holder, _ = blocked(bench, 3)
    before = bench.deliveries()
    with bench.connect() as other:
        bench.lock_delivery(other, before[1])
        holder.hold_back()
    assert bench.deliveries() == [before[1]]
    assert behind(bench) == [before[0], before[2]]
    assert holder.claim() == []  # it waits for the one in front of it


def test_later_ones_wait_behind_those_that_are_set_aside(bench: Bench) -> None:
    holder, head = blocked(bench, 3)
    holder.hold_back()
    bench.publish(new_event(KEY, handlers=("a",)))
    free(bench, head)
    assert holder.claim() == []
    first = behind(bench)
    assert let_go(holder, 2) == {(LANE, PAIR): 2}
    assert ids(holder.claim()) == first[:2]
    assert let_go(holder) == {(LANE, PAIR): 1}
    assert len(bench.deliveries()) == 4


@pytest.mark.parametrize("everywhere", [True, False])
def test_nothing_is_let_go_behind_what_blocks(bench: Bench, everywhere: bool) -> None:
    holder, head = blocked(bench, 3)
    holder.hold_back()
    assert let_go(holder, everywhere=everywhere) == {}
    free(bench, head)
    assert let_go(holder, everywhere=everywhere) == {(LANE, PAIR): 3}
    assert let_go(holder, everywhere=everywhere) == ({} if everywhere else {(LANE, PAIR): 0})
    assert behind(bench) == []


def test_everywhere_means_every_lane_handler_and_key(bench: Bench) -> None:
    holder = bench.holder("a", "b")
    keys = [KEY, key_on(LANE, 1), key_on(LANE + 1)]
    bench.publish(*(new_event(key, handlers=("a", "b")) for key in keys for _ in range(3)))
    holder.take(LANE, LANE + 1)
    heads = {(d.handler, d.key): d for d in reversed(holder.claim())}
    assert len(heads) == 6
    assert len(holder.park(*(parked(head) for head in heads.values()))) == 6
    assert len(holder.hold_back()) == 6
    assert bench.deliveries() == []
    for head in list(heads.values())[:4]:
        free(bench, head)
    assert sum(let_go(holder, everywhere=True).values()) == 8
    assert len(behind(bench)) == 4


def test_two_that_let_go_at_once_keep_the_order(bench: Bench) -> None:
    """The second moves later rows, which wait until the first has committed."""
    holder, head = blocked(bench, 6)
    holder.hold_back()
    free(bench, head)
    first = behind(bench)
    with bench.connect() as one:
        assert bench.store.let_go(one, {(LANE, PAIR)}, 2) == {(LANE, PAIR): 2}
        assert let_go(holder, 2) == {(LANE, PAIR): 2}
        assert bench.deliveries() == first[2:4]
        assert holder.claim() == []
        one.commit()
    assert ids(holder.claim()) == first[:4]


def test_of_a_parking_handler_none_stays_behind_a_dead_one(bench: Bench) -> None:
    holder, _ = blocked(bench, 3, status="dead")
    assert holder.hold_back(beyond=64) == set()
    assert holder.hold_back(beyond=64, parking=("a",)) == {(LANE, PAIR)}
    assert len(behind(bench)) == 3


def test_of_a_parking_handler_some_stay_behind_one_that_is_tried_again(bench: Bench) -> None:
    holder, _ = blocked(bench, 3)
    assert holder.hold_back(beyond=64, parking=("a",)) == set()


def test_the_next_holder_knows_what_is_set_aside(bench: Bench) -> None:
    holder, _ = blocked(bench, 3)
    holder.hold_back()
    holder.expire(LANE)
    assert bench.holder("a").take(LANE)[LANE].behind == {PAIR}


def test_the_lanes_on_which_a_key_is_blocked(bench: Bench) -> None:
    holder, head = blocked(bench, 1)
    unkeyed = new_event(None, handlers=("a",))
    bench.publish(unkeyed)
    assert bench.store.blocked_lanes(holder.connection) == [LANE]
    free(bench, head)
    assert bench.store.blocked_lanes(holder.connection) == []


@pytest.mark.parametrize("place", ["among the first", "at the end"])
def test_a_hot_key_makes_room_for_others_behind_it(bench: Bench, place: str) -> None:
    many = 10 if place == "among the first" else 1500
    holder = bench.holder("a")
    bench.publish(*(new_event(KEY) for _ in range(many)), new_event(key_on(LANE, 1)))
    if place == "among the first":  # and not among the last
        bench.publish(*(new_event(KEY) for _ in range(300)))
    holder.take(LANE)
    running = holder.exchange(limit=4).startable
    all_of_it = bench.deliveries()
    other = all_of_it[many]
    assert holder.thin_out([(LANE, PAIR)], running, 5000) == {(LANE, PAIR)}
    assert behind(bench) == all_of_it[4:many]
    assert ids(holder.exchange(started=running, limit=1).startable) == [other]


def test_a_hot_key_that_is_alone_stays(bench: Bench) -> None:
    holder = bench.holder("a")
    bench.publish(new_event(key_on(LANE, 1)), *(new_event(KEY) for _ in range(10)))
    holder.take(LANE)
    before = bench.contents()
    assert holder.thin_out([(LANE, PAIR)]) == set()
    assert bench.contents() == before


def test_another_handler_of_a_hot_key_is_one_of_the_others(bench: Bench) -> None:
    """It has made as little progress, but nobody runs it: it goes first."""
    holder = bench.holder("a")
    both = [new_event(KEY, handlers=("a", "b")) for _ in range(3)]
    bench.publish(*both, *(new_event(KEY) for _ in range(300)))
    holder.take(LANE)
    a1, b1, a2, b2, a3, b3 = bench.deliveries()[:6]
    assert holder.thin_out([(LANE, PAIR)]) == {(LANE, PAIR)}
    assert behind(bench) == [a1, a2, a3]
    assert bench.deliveries()[:3] == [b1, b2, b3]


def test_another_handler_of_a_hot_key_at_the_end(bench: Bench) -> None:
    holder = bench.holder("a")
    bench.publish(*(new_event(KEY) for _ in range(1100)), new_event(KEY, handlers=("b",)))
    holder.take(LANE)
    before = bench.deliveries()
    holder.thin_out([(LANE, PAIR)], limit=2000)
    assert behind(bench) == before[:-1]


def test_of_a_hot_key_what_somebody_has_locked_stays(bench: Bench) -> None:
    holder = bench.holder("a")
    bench.publish(*(new_event(KEY) for _ in range(3)), new_event(key_on(LANE, 1)))
    holder.take(LANE)
    first, locked, third, other = bench.deliveries()
    with bench.connect() as stranger:
        bench.lock_delivery(stranger, locked)
        holder.thin_out([(LANE, PAIR)])
    assert behind(bench) == [first, third]
    assert bench.deliveries() == [locked, other]


@pytest.mark.parametrize("everywhere", [True, False])
def test_what_somebody_has_locked_is_let_go_later(bench: Bench, everywhere: bool) -> None:
    """Such as another worker, which lets the same ones go."""
    holder, head = blocked(bench, 3)
    holder.hold_back()
    free(bench, head)
    first, locked, third = behind(bench)
    with bench.connect() as stranger:
        bench.lock_parked(stranger, locked)
        assert let_go(holder, everywhere=everywhere) == {(LANE, PAIR): 2}
    assert bench.deliveries() == [first, third]
    assert ids(holder.claim()) == [first]  # the third waits for the one that is left
    assert let_go(holder, everywhere=everywhere) == {(LANE, PAIR): 1}
