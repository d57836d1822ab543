"""Retention: what goes and what stays, a page at a time, beside publishers, workers and purges."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4, uuid5

import pytest
from psycopg import ClientCursor
from sqlalchemy import Connection, Engine, create_engine, event, func, insert, select, text, update

from sqlalchemy_relaybus import ConfigurationError, PurgeResult, RelayBus, purge
from sqlalchemy_relaybus.exc import SchemaMissingError
from sqlalchemy_relaybus.stores.base import PurgedEvents
from tests.support.plans import DIRECT, Plan
from tests.support.processes import Process
from tests.support.stores import Bench, Holder, eventually, key_on, new_event, parked, waiting

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)
#: Of the events that are old: older than DAY.
WEEK, DAY = timedelta(days=7), timedelta(days=1)
FIRST, LAST = UUID(int=0), UUID(int=2**128 - 1)


@pytest.fixture
def bench(engine: Engine) -> Iterator[Bench]:
    with Bench(engine) as bench:
        yield bench


def store_events(bench: Bench, *ids: UUID, age: timedelta = WEEK) -> None:
    """Events without a delivery: done, or never taken by a handler."""
    rows = [{"id": id, "type": "test.happened", "payload": "{}", "handlers": ["a"]} for id in ids]
    with bench.engine.begin() as connection:
        connection.execute(insert(bench.tables.events), rows)
    grow_old(bench, *ids, age=age)


def grow_old(bench: Bench, *ids: UUID, age: timedelta = WEEK) -> None:
    """Let events have been published *age* ago."""
    events = bench.tables.events
    with bench.engine.begin() as connection:
        connection.execute(
            update(events)
            .where(events.c.id.in_(ids))
            .values(created_at=func.clock_timestamp() - age)
        )


def published(bench: Bench, *handlers: str, key: str | None = KEY) -> UUID:
    """An old event with a delivery for each of *handlers*."""
    new = new_event(key, id=uuid4(), handlers=handlers or ("a",))
    bench.publish(new)
    grow_old(bench, new.event.id)
    return new.event.id


def stored(bench: Bench) -> set[UUID]:
    """The ids of the events that there are."""
    return {id for (id,) in bench.read(select(bench.tables.events.c.id))}


def taken(bench: Bench, *handlers: str) -> Holder:
    holder = bench.holder(*handlers)
    holder.take(LANE)
    return holder


def purge_page(bench: Bench, connection: Connection, limit: int = 1000) -> PurgedEvents:
    """One page from the first event on, in the transaction of *connection*."""
    return bench.store.purge_events(connection, FIRST, DAY.total_seconds(), limit)


def impatient(bench: Bench) -> Connection:
    """A connection for what must not wait for a lock."""
    connection = bench.connect()
    connection.execute(text("SET lock_timeout = '2s'"))
    connection.commit()
    return connection


@contextmanager
def before(target: Any, words: str, act: Callable[[], object]) -> Iterator[None]:
    """*act* once, just before *target*, a connection or engine, sends a statement with *words*."""
    acted: list[bool] = []

    def look(conn: object, cursor: object, statement: str, *more: object) -> None:
        if words in statement and not acted:
            acted.append(True)
            act()

    event.listen(target, "before_cursor_execute", look)
    try:
        yield
    finally:
        event.remove(target, "before_cursor_execute", look)
    assert acted, f"nothing with {words!r} was sent"


LOCKS, REMOVES = "FOR UPDATE OF relaybus_events", "DELETE FROM relaybus_events"


# -- what goes and what stays ----------------------------------------------------------------------


def test_old_events_without_a_delivery_go_and_young_ones_stay(bench: Bench) -> None:
    old, young = [uuid4() for _ in range(3)], [uuid4() for _ in range(2)]
    store_events(bench, *old)
    store_events(bench, *young, age=DAY - timedelta(minutes=1))
    result = purge(bench.engine, bench.tables, events_older_than=DAY)
    assert result == PurgeResult(events=3)
    assert stored(bench) == set(young)


def test_events_of_age_zero_go_too_if_that_is_asked(bench: Bench) -> None:
    bench.publish(new_event(handlers=()), new_event(handlers=()))
    assert purge(bench.engine, bench.tables, events_older_than=0).events == 2


def test_an_event_that_is_not_done_stays_whatever_its_age(bench: Bench) -> None:
    claims = taken(bench, "runs", "retries", "snoozes", "dies")
    wanted = {name: published(bench, name) for name in claims.handlers}
    by_handler = {delivery.handler: delivery for delivery in claims.claim()}
    claims.park(
        parked(by_handler["retries"]),
        parked(by_handler["snoozes"], "snoozed"),
        parked(by_handler["dies"], "dead", delay=None, blocks=False),
    )
    strange = published(bench, "strange", key=OTHER_KEY)
    bench.store.set_aside(
        claims.connection, claims.id, list(claims.leases.values()), claims.handlers, 10
    )
    ready = published(bench)
    delayed = new_event(id=uuid4(), delay=3600)
    bench.publish(delayed)
    grow_old(bench, delayed.event.id)
    statuses = bench.read(select(bench.tables.parked.c.status).order_by("status"))
    assert [status for (status,) in statuses] == [
        *("dead", "delayed", "retrying", "snoozed", "unhandled")
    ]
    everything = {*wanted.values(), strange, ready, delayed.event.id}
    result = purge(bench.engine, bench.tables, events_older_than=0)
    assert result == PurgeResult(undone=len(everything))
    assert stored(bench) == everything
    # and goes when it is done
    claims.exchange(finished=[by_handler["runs"]], claim=False)
    assert purge(bench.engine, bench.tables, events_older_than=DAY).events == 1
    assert stored(bench) == everything - {wanted["runs"]}


def test_an_event_stays_until_its_last_handler_is_done(bench: Bench) -> None:
    id = published(bench, "a", "b")
    holder = taken(bench)
    first, second = holder.claim()
    holder.exchange(finished=[first], started=[second], claim=False)
    assert purge(bench.engine, bench.tables, events_older_than=DAY).undone == 1
    holder.exchange(finished=[second], claim=False)
    assert stored(bench) == {id}
    assert purge(bench.engine, bench.tables, events_older_than=DAY).events == 1


def test_a_completion_that_is_not_committed_keeps_its_event(bench: Bench) -> None:
    published(bench)
    holder = taken(bench)
    [delivery] = holder.claim()
    transaction = bench.connect()
    assert holder.complete(delivery, transaction)
    assert purge(bench.engine, bench.tables, events_older_than=DAY).undone == 1
    transaction.commit()
    assert purge(bench.engine, bench.tables, events_older_than=DAY).events == 1


def bury(bench: Bench, count: int, age: timedelta = WEEK) -> list[UUID]:
    """Dead letters since *age*; their events."""
    wanted = [published(bench, key=None) for _ in range(count)]
    deliveries, graves = bench.tables.deliveries, bench.tables.parked
    gone = deliveries.delete().returning(
        deliveries.c.id, deliveries.c.event_id, deliveries.c.lane, deliveries.c.handler
    )
    with bench.engine.begin() as connection:
        rows = [
            {**row, "status": "dead", "blocks": False, "parked_at": func.now() - age}
            for row in connection.execute(gone).mappings()
        ]
        for row in rows:
            connection.execute(insert(graves).values(**row))
    return wanted


def test_dead_letters_go_only_if_asked_and_by_their_own_age(bench: Bench) -> None:
    old, young = bury(bench, 5), bury(bench, 2, age=timedelta(hours=1))
    assert purge(bench.engine, bench.tables, events_older_than=DAY).undone == 7
    assert len(bench.parked()) == 7
    result = purge(bench.engine, bench.tables, dead_older_than=DAY, batch=2)
    assert result == PurgeResult(dead=5)
    assert len(bench.parked()) == 2
    assert stored(bench) == {*old, *young}
    # and then their events, in the same purge
    result = purge(bench.engine, bench.tables, dead_older_than=0, events_older_than=DAY)
    assert result == PurgeResult(events=7, dead=2)


def test_a_page_of_dead_letters_begins_after_the_one_before(bench: Bench) -> None:
    """Not with the dead entries of the index that the one before has left."""
    for n in range(4):
        bury(bench, 1, age=WEEK - timedelta(hours=n))
    first = bench.parked()[0]
    purger = bench.connect()
    page = bench.store.purge_dead(purger, None, DAY.total_seconds(), 2)
    purger.rollback()
    assert page.last is not None
    assert page.last.id == bench.parked()[1]
    assert bench.store.purge_dead(purger, page.last, DAY.total_seconds(), 1).removed == 1
    purger.commit()
    assert len(bench.parked()) == 3
    assert bench.parked()[:2] == [first, page.last.id]


def test_what_is_parked_and_not_dead_is_no_dead_letter(bench: Bench) -> None:
    published(bench)
    holder = taken(bench)
    holder.park(*(parked(each, delay=None) for each in holder.claim()))
    assert purge(bench.engine, bench.tables, dead_older_than=0) == PurgeResult()
    assert len(bench.parked()) == 1


def test_records_of_completed_deliveries_go_by_their_own_age(bench: Bench) -> None:
    completed = bench.tables.completed
    with bench.engine.begin() as connection:
        for id in range(1, 8):  # several of one moment: a page may end between them
            age = WEEK if id < 6 else timedelta(hours=1)
            row = {"id": id, "event_id": uuid4(), "attempts": 1, "handler": "a"}
            connection.execute(insert(completed).values(completed_at=func.now() - age, **row))
    steps: list[PurgeResult] = []
    result = purge(
        bench.engine, bench.tables, completed_older_than=DAY, batch=2, progress=steps.append
    )
    assert result == PurgeResult(completed=5)
    assert [step.completed for step in steps] == [2, 4, 5]
    assert bench.read(select(completed.c.id).order_by("id")) == [(6,), (7,)]


# -- the walk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 1000])
def test_every_event_is_looked_at_whatever_its_id(bench: Bench, batch: int) -> None:
    old = [FIRST, LAST, *(uuid4() for _ in range(7)), *(uuid5(FIRST, str(n)) for n in range(7))]
    young = [UUID(int=n << 120) for n in range(1, 255, 30)]  # between the old ones
    store_events(bench, *old)
    store_events(bench, *young, age=timedelta())
    steps: list[PurgeResult] = []
    result = purge(
        bench.engine, bench.tables, events_older_than=DAY, batch=batch, progress=steps.append
    )
    assert result == steps[-1] == PurgeResult(events=len(old))
    assert stored(bench) == set(young)
    places = [step.next for step in steps[:-1]]
    assert all(a is not None and b is not None and a < b for a, b in itertools.pairwise(places))
    assert len(steps) >= (len(old) + len(young)) // batch


def test_each_page_is_committed_before_progress_is_told_of_it(bench: Bench) -> None:
    store_events(bench, *(uuid4() for _ in range(25)))
    left: list[int] = []
    purge(
        bench.engine,
        bench.tables,
        events_older_than=DAY,
        batch=10,
        progress=lambda step: left.append(len(stored(bench))),
    )
    assert left == [15, 5, 0]


def test_a_purge_that_progress_ends_goes_on_where_it_was(bench: Bench) -> None:
    store_events(bench, *(UUID(int=n) for n in range(1, 31)))
    bench.publish(*(new_event(id=UUID(int=n << 64)) for n in range(1, 11)))
    steps: list[PurgeResult] = []

    def twice(step: PurgeResult) -> None:
        steps.append(step)
        if len(steps) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        purge(bench.engine, bench.tables, events_older_than=DAY, batch=10, progress=twice)
    assert steps[-1] == PurgeResult(events=20, next=UUID(int=21))
    seen: list[PurgeResult] = []
    result = purge(
        bench.engine,
        bench.tables,
        events_older_than=DAY,
        batch=10,
        start=steps[-1].next,
        progress=seen.append,
    )
    assert result.events == 10
    assert len(seen) == 3  # full pages, the last of which does not know it


KILLED = """
import sys
from sqlalchemy import create_engine
from sqlalchemy_relaybus import RelayBus, purge

purge(
    create_engine(sys.argv[1]), RelayBus(), events_older_than=0, batch=10,
    progress=lambda step: print("purged", step.events, flush=True),
)
"""


def test_a_purge_that_is_killed_in_a_page_leaves_that_page_and_can_be_repeated(
    bench: Bench, database_url: str, tmp_path: Path
) -> None:
    store_events(bench, *(UUID(int=n) for n in range(1, 101)))
    (tmp_path / "purges.py").write_text(KILLED)
    with bench.engine.begin() as connection:  # the process stops in its sixth page
        connection.execute(
            text(
                """
                CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                  PERFORM pg_advisory_xact_lock(1);
                  RETURN old;
                END $$
                """
            )
        )
        connection.execute(
            text(
                f"CREATE TRIGGER stop BEFORE DELETE ON relaybus_events FOR EACH ROW "
                f"WHEN (old.id = '{UUID(int=55)}') EXECUTE FUNCTION stop()"
            )
        )
    keeper = bench.connect()
    keeper.execute(select(func.pg_advisory_xact_lock(1)))
    others = text(
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%DELETE FROM relaybus_events%' "
        "AND datname = current_database() AND pid <> pg_backend_pid() AND "
        "(wait_event = 'advisory' OR NOT :waits)"
    )
    command = [sys.executable, "-W", "error", str(tmp_path / "purges.py"), database_url]
    with bench.connect("AUTOCOMMIT") as watcher:
        with Process(command, env={"PYTHONPATH": str(Path(__file__).parents[2])}) as process:
            process.wait_for_line("purged 50")
            eventually(lambda: watcher.scalar(others, {"waits": True}), "it is in the sixth page")
            process.send(signal.SIGKILL)
            process.wait()
        keeper.rollback()
        eventually(lambda: not watcher.scalar(others, {"waits": False}), "its server has ended")
    assert stored(bench) == {UUID(int=n) for n in range(51, 101)}
    steps: list[PurgeResult] = []
    result = purge(
        bench.engine, bench.tables, events_older_than=DAY, batch=10, progress=steps.append
    )
    assert result == PurgeResult(events=50)
    assert stored(bench) == set()


# -- beside publishers -----------------------------------------------------------------------------


def test_an_event_that_is_just_published_again_is_stepped_over(bench: Bench) -> None:
    id, other = uuid4(), uuid4()
    store_events(bench, id, other)
    publisher, purger = bench.connect(), impatient(bench)
    bench.store.publish(publisher, [new_event(KEY, id=id, handlers=("a", "b"))])
    assert purge_page(bench, purger) == PurgedEvents(1, 0, 1, None)
    purger.commit()
    publisher.commit()
    assert stored(bench) == {id}
    assert len(bench.deliveries()) == 1
    assert purge_page(bench, purger) == PurgedEvents(0, 1, 0, None)


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "AUTOCOMMIT"])
def test_an_event_published_again_before_the_locks_stays(
    bench: Bench, database_url: str, isolation: Any
) -> None:
    """Whatever the isolation of the application's engine is: the later statement sees it."""
    id = uuid4()
    store_events(bench, id)
    again = new_event(KEY, id=id, handlers=("a", "b"))
    engine = create_engine(database_url, isolation_level=isolation)
    with before(engine, LOCKS, lambda: bench.publish(again)):
        assert purge(engine, bench.tables, events_older_than=DAY) == PurgeResult(undone=1)
    engine.dispose()
    assert stored(bench) == {id}


def test_an_event_published_again_between_the_snapshot_and_the_locks_stays(bench: Bench) -> None:
    id, other = uuid4(), uuid4()
    store_events(bench, id, other)
    purger = bench.connect()
    with bench.gate(purger) as keeper:
        with waiting(purger, lambda: purge_page(bench, purger)) as purging:
            bench.publish(new_event(KEY, id=id, handlers=("a", "b")))
            keeper.rollback()
            assert purging.result().removed == 1
        purger.commit()
    assert stored(bench) == {id}
    assert len(bench.deliveries()) == 1


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "AUTOCOMMIT"])
def test_whoever_publishes_an_event_that_is_being_purged_waits_and_stores_it_anew(
    bench: Bench, database_url: str, isolation: Any
) -> None:
    """It waits for the purge's lock, between that and the removal."""
    id = published(bench)
    holder = taken(bench)
    holder.exchange(finished=holder.claim())
    publisher = bench.connect()
    again = new_event(KEY, id=id, handlers=("a", "b"))
    engine = create_engine(database_url, isolation_level=isolation)
    with ExitStack() as stack:
        publishing = waiting(publisher, lambda: bench.store.publish(publisher, [again]))
        with before(engine, REMOVES, lambda: stack.enter_context(publishing)):
            assert purge(engine, bench.tables, events_older_than=DAY).events == 1
    engine.dispose()
    publisher.commit()
    assert stored(bench) == {id}
    # it is a new event: both handlers run, also the one that had run
    assert [d.handler for d in holder.claim()] == ["a", "b"]


def test_whoever_publishes_a_removed_event_waits_for_the_commit(bench: Bench) -> None:
    id = uuid4()
    store_events(bench, id)
    publisher, purger = bench.connect(), bench.connect()
    assert purge_page(bench, purger).removed == 1
    again = new_event(KEY, id=id)
    with waiting(publisher, lambda: bench.store.publish(publisher, [again])) as publishing:
        purger.commit()
        publishing.result()
    publisher.commit()
    assert stored(bench) == {id}
    assert [d.handler for d in taken(bench).claim()] == ["a"]


def test_whoever_waited_for_a_purge_that_failed_finds_the_event(bench: Bench) -> None:
    id = uuid4()
    store_events(bench, id)
    publisher, purger = bench.connect(), bench.connect()
    assert purge_page(bench, purger).removed == 1
    again = new_event(None, id=id, handlers=("a", "b"))
    with waiting(publisher, lambda: bench.store.publish(publisher, [again])) as publishing:
        purger.rollback()
        publishing.result()
    publisher.commit()
    handlers = bench.read(select(bench.tables.deliveries.c.handler))
    assert handlers == [("b",)]  # "a" is done


# -- beside workers, operators and other purges ----------------------------------------------------


def test_workers_do_not_wait_for_a_page(bench: Bench) -> None:
    store_events(bench, *(uuid4() for _ in range(5)))
    published(bench, "a", "b")
    holder = taken(bench)
    holder.connection.execute(text("SET lock_timeout = '2s'"))
    purger = bench.connect()
    assert purge_page(bench, purger) == PurgedEvents(5, 1, 0, None)
    first, second = holder.claim()
    assert holder.complete(first)
    assert holder.park(parked(second, delay=0))
    assert holder.promote() == [LANE]
    assert [d.handler for d in holder.claim()] == [second.handler]
    bench.publish(new_event(KEY))
    purger.commit()


def test_two_purges_at_once_do_not_wait_for_each_other(bench: Bench) -> None:
    store_events(bench, *(uuid4() for _ in range(5)))
    first, second = bench.connect(), impatient(bench)
    assert purge_page(bench, first).removed == 5
    assert purge_page(bench, second) == PurgedEvents(0, 0, 5, None)
    second.commit()
    first.rollback()
    assert purge_page(bench, second).removed == 5


def test_purges_at_once_remove_everything_once(bench: Bench) -> None:
    store_events(bench, *(uuid4() for _ in range(2000)))
    bury(bench, 50)
    latch = threading.Barrier(3)

    def run() -> PurgeResult:
        latch.wait(30)
        return purge(
            bench.engine, bench.tables, events_older_than=DAY, dead_older_than=DAY, batch=20
        )

    with ThreadPoolExecutor(3) as pool:
        results = [future.result() for future in [pool.submit(run) for _ in range(3)]]
    # an event whose dead letter another one had just locked is still there
    rest = purge(bench.engine, bench.tables, events_older_than=DAY)
    assert sum(result.events for result in [*results, rest]) == 2050
    assert sum(result.dead for result in results) == 50
    assert stored(bench) == set()


def test_a_dead_letter_that_is_being_requeued_stays(bench: Bench) -> None:
    bury(bench, 2)
    [one, _] = bench.parked()
    operator, purger = bench.connect(), impatient(bench)
    assert bench.store.requeue(operator, [one]) == {one}
    assert bench.store.purge_dead(purger, None, DAY.total_seconds(), 10).removed == 1
    purger.commit()
    operator.commit()
    assert bench.deliveries() == [one]


def test_a_dead_letter_that_is_being_purged_is_not_requeued(bench: Bench) -> None:
    bury(bench, 1)
    [one] = bench.parked()
    operator, purger = bench.connect(), bench.connect()
    assert bench.store.purge_dead(purger, None, DAY.total_seconds(), 10).removed == 1
    with waiting(operator, lambda: bench.store.requeue(operator, [one])) as requeueing:
        purger.commit()
        assert requeueing.result() == set()
    operator.commit()
    assert (bench.deliveries(), bench.parked()) == ([], [])


# -- what it costs ---------------------------------------------------------------------------------

_SEED = """
INSERT INTO relaybus_events (id, created_at, type, payload, handlers)
SELECT CAST(lpad(to_hex(n), 32, '0') AS uuid), now() - interval '7 days', 'test.happened', '{}',
  '{a}'
FROM generate_series(1, 50000) AS n;

INSERT INTO relaybus_deliveries (event_id, lane, handler)
SELECT CAST(lpad(to_hex(2 * n), 32, '0') AS uuid), n % 256, 'a' FROM generate_series(1, 20000) AS n;

INSERT INTO relaybus_parked (event_id, lane, handler, blocks, status, parked_at)
SELECT CAST(lpad(to_hex(40000 + n), 32, '0') AS uuid), n % 256, 'a', false, 'dead',
  now() - n * interval '1 minute' FROM generate_series(1, 5000) AS n
"""


@contextmanager
def explained(connection: Connection) -> Iterator[dict[str, Plan]]:
    """The plans of what is sent, by its first word and table, run where and when it is sent."""
    plans: dict[str, Plan] = {}
    driver: Any = connection.connection.driver_connection

    def explain(conn: object, cursor: object, statement: str, parameters: Any, *m: object) -> None:
        for words in (LOCKS, REMOVES, "DELETE FROM relaybus_parked"):
            if words in statement:
                with ClientCursor(driver) as client:
                    client.execute("SAVEPOINT explained")
                    client.execute(
                        f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}".encode(), parameters
                    )
                    [(found,)] = client.fetchall()
                    client.execute("ROLLBACK TO explained")
                plans[words] = Plan(found[0]["Plan"], repr(found[0]["Plan"]))

    event.listen(connection, "before_cursor_execute", explain)
    yield plans
    event.remove(connection, "before_cursor_execute", explain)


@pytest.mark.parametrize("statistics", ["full", "none", "empty"])
def test_the_queue_is_read_once_a_page_and_all_else_directly(bench: Bench, statistics: str) -> None:
    with bench.connect("AUTOCOMMIT") as setup:
        if statistics == "empty":
            setup.execute(text("VACUUM ANALYZE"))
        for statement in _SEED.split(";\n"):
            setup.execute(text(statement))
        if statistics == "full":
            setup.execute(text("ANALYZE"))
    purger = bench.connect()
    with explained(purger) as plans:
        assert bench.store.purge_events(purger, UUID(int=20_001), 0, 1000).removed == 500
        purger.commit()
        assert bench.store.purge_dead(purger, None, DAY.total_seconds(), 1000).removed == 1000
        purger.commit()
    locks, removes, buries = plans.values()
    queues = {"relaybus_deliveries", "relaybus_parked"}
    assert locks.paths() == {("relaybus_events", "relaybus_events_pkey")}, locks
    assert locks.removed == 0
    assert locks.buffers < 8000, locks
    for scan in removes.scans():
        if scan["Relation Name"] in queues:
            assert scan["Node Type"] == "Seq Scan", removes
            assert scan["Actual Loops"] == 1, removes
            assert scan["Actual Rows"] <= 1000, removes  # none but the page's are gathered
        else:
            assert scan["Index Name"] == "relaybus_events_pkey", removes
    assert len(list(removes.scans())) == 3
    assert removes.removed <= 25_000 + 500
    assert removes.buffers < 8000, removes
    assert all(scan["Node Type"] in DIRECT for scan in buries.scans()), buries
    assert buries.paths() == {
        ("relaybus_parked", "relaybus_parked_dead_idx"),
        ("relaybus_parked", "Tid Scan"),
    }, buries
    assert buries.buffers < 6000, buries
    assert buries.removed == 0


def test_no_page_is_removed_with_a_plan_that_does_not_know_its_ids(bench: Bench) -> None:
    """The driver prepares what is sent often; the server would make a generic plan of it."""
    store_events(bench, *(UUID(int=n) for n in range(1, 401)))
    purger = bench.connect()
    for page in range(30):
        start = UUID(int=1 + page * 10)
        assert bench.store.purge_events(purger, start, DAY.total_seconds(), 10).removed == 10
        purger.commit()
    plans = purger.execute(
        text(
            "SELECT custom_plans, generic_plans FROM pg_prepared_statements "
            f"WHERE statement LIKE '%{REMOVES}%'"
        )
    ).all()
    assert [tuple(row) for row in plans] == [(pytest.approx(25, abs=3), 0)]
    assert purger.scalar(text("SHOW plan_cache_mode")) == "auto"


# -- what cannot be used ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"events_older_than": -1},
        {"events_older_than": timedelta(seconds=-1)},
        {"events_older_than": float("nan")},
        {"events_older_than": float("inf")},
        {"events_older_than": timedelta.max},
        {"events_older_than": True},
        {"events_older_than": "7 days"},
        {"events_older_than": datetime(2026, 1, 1)},  # noqa: DTZ001 - what is refused
        {"events_older_than": 10**400},
        {"dead_older_than": -1},
        {"completed_older_than": "1"},
        {"events_older_than": 0, "batch": 0},
        {"events_older_than": 0, "batch": -1},
        {"events_older_than": 0, "batch": 10_001},
        {"events_older_than": 0, "batch": 1.5},
        {"events_older_than": 0, "batch": True},
        {"events_older_than": 0, "start": "x"},
    ],
)
def test_arguments_that_cannot_be_used_are_refused_at_the_call(arguments: dict[str, Any]) -> None:
    engine = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nowhere")
    with pytest.raises(ConfigurationError):
        purge(engine, RelayBus(), **arguments)


def test_what_is_no_engine_or_bus_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigurationError, match="synchronous Engine"):
        purge(engine.connect, RelayBus(), events_older_than=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="RelayBus"):
        purge(engine, "relaybus_", events_older_than=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="sqlite"):
        purge(create_engine("sqlite://"), RelayBus(), events_older_than=0)


def test_a_database_without_the_tables_is_named(empty_engine: Engine) -> None:
    with pytest.raises(SchemaMissingError):
        purge(empty_engine, RelayBus(), events_older_than=0)
