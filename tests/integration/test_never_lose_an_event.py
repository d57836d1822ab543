"""No event is lost.

A delivery's row exists from the commit that publishes it until the commit that completes it.
Claiming does not touch it, and moving it between ready and parked is one statement. A lane whose
worker is gone is taken over, whatever its worker had in flight. Lost replies, cut connections and a
database that goes away leave open only whether a statement happened, and the lane's version tells.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, delete, select, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import Context, Event, Fixed, RelayBus
from sqlalchemy_relaybus.stores.postgresql.store import PostgreSQLStore
from sqlalchemy_relaybus.testing.server import PrivatePostgres, private_postgres
from tests.support.application import QUICK, application_bus, noted
from tests.support.databases import SETTINGS, open_engine
from tests.support.proxy import proxy_to
from tests.support.stores import Bench, ids, key_on, new_event, parked
from tests.support.workers import (
    LIMIT,
    Runs,
    dead,
    drained,
    eventually,
    held_lanes,
    publish,
    ready,
    terminated,
    worker_process,
    working,
)

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)


@pytest.fixture
def bus() -> RelayBus:
    """It publishes to the application, too."""
    return application_bus()


# -- the row stays ---------------------------------------------------------------------------------


def test_a_delivery_that_commits_late_is_claimed_although_its_id_is_lower(bench: Bench) -> None:
    first = bench.connect()
    bench.store.publish(first, [new_event(KEY)])
    bench.publish(new_event(OTHER_KEY))
    holder = bench.holder()
    holder.take(LANE)
    claimed = holder.claim()
    first.commit()
    [late] = holder.exchange(started=claimed).startable
    assert late.id < claimed[0].id


def test_a_delivery_without_its_event_comes_all_the_same(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    with bench.engine.begin() as connection:
        connection.execute(delete(bench.tables.events).where(bench.tables.events.c.sequence == 1))
    holder.take(LANE)
    orphan, other = holder.claim()
    assert orphan.event is None
    assert other.event is not None
    assert holder.park(parked(orphan, "dead", delay=None, charge=0, blocks=False)) == {orphan.id}


def test_an_orphan_is_buried(bus: RelayBus, engine: Engine) -> None:
    runs = Runs()

    @bus.handler("step", name="h")
    async def h(event: Event) -> None:
        runs.add(event.payload)

    first, *_ = publish(bus, engine, "step", 1, 2, 3, key="k")
    with engine.begin() as connection:
        connection.execute(delete(bus.tables.events).where(bus.tables.events.c.id == first.id))
    with working(bus, engine):
        drained(bus, engine)
        (letter,) = eventually(lambda: dead(bus, engine))
    assert (letter.attempts, letter.last_error) == (0, "its event is gone from the events table")
    assert runs.rows == [(2,), (3,)]


def test_a_worker_sets_them_aside_and_the_right_one_takes_them_back(engine: Engine) -> None:
    ours, theirs = RelayBus(), RelayBus()
    runs = Runs()

    @ours.handler("step", name="ours")
    def mine(event: Event) -> None:
        runs.add("ours", event.payload)

    @theirs.handler("step", name="theirs")
    def other(event: Event) -> None:
        runs.add("theirs", event.payload)

    ours.route("step", to=["theirs"])
    publish(ours, engine, "step", *range(5), key="k")
    with Bench(engine) as bench:
        with working(ours, engine, lease_duration=1.0):
            runs.wait(5)
            eventually(lambda: len(bench.unhandled()) == 5)
        publish(ours, engine, "step", 5, key="k")
        with working(ours, engine), working(theirs, engine):
            drained(ours, engine)
            eventually(lambda: bench.unhandled() == [])
            drained(ours, engine)
    assert [n for name, n in runs.rows if name == "theirs"] == [0, 1, 2, 3, 4, 5]
    assert [n for name, n in runs.rows if name == "ours"] == [0, 1, 2, 3, 4, 5]


# -- lost replies ----------------------------------------------------------------------------------


def test_after_a_lost_reply_the_lane_tells_what_was_claimed(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(OTHER_KEY))
    holder.take(LANE)
    before = holder.leases[LANE]
    reply = holder.exchange(room=1)
    holder.leases[LANE] = before  # as if it had never arrived

    assert holder.exchange().leases == {}
    state = bench.store.read_lanes(holder.connection, [LANE])[LANE]
    assert (state.lease.epoch, state.lease.version) == (before.epoch, before.version + 1)
    assert (state.started, state.prefetched) == (ids(reply.startable), ids(reply.prefetched))


@pytest.mark.parametrize("sent", ["exchange", "renew", "relinquish", "park"])
def test_a_connection_that_is_cut_before_the_reply(
    bench: Bench, short_path: Path, sent: str
) -> None:
    """The statement has committed, and over another connection the lane says so."""
    bench.publish(new_event(KEY), new_event(OTHER_KEY))
    url = bench.engine.url.render_as_string(hide_password=False)
    with (
        proxy_to(url, short_path) as proxy,
        open_engine(proxy.url) as engine,
        Bench(engine) as behind,
    ):
        cut, new = behind.holder(), bench.holder()
        cut.take(LANE)
        [first] = cut.exchange(limit=1).startable
        believed = cut.leases[LANE]

        def send() -> None:
            if sent == "exchange":
                cut.exchange(finished=[first])
            elif sent == "renew":
                cut.renew()
            elif sent == "relinquish":
                cut.relinquish()
            else:
                cut.park(parked(first))

        proxy.cut_reply_to(b"")  # to whatever is sent next
        with pytest.raises(DBAPIError) as caught:
            send()
        assert caught.value.connection_invalidated
        assert proxy.cuts == 1
        # in the worker's words: written once more than it knows of, by itself
        again = bench.holder()
        again.id = cut.id
        state = bench.store.read_lanes(again.connection, [LANE])[LANE]
        if sent == "relinquish":
            assert state.holder is None
            assert new.take(LANE)[LANE].suspects == {}
            assert ids(new.claim()) == ids([first]) + [first.id + 1]
            return
        assert (state.holder, state.lease.epoch) == (cut.id, believed.epoch)
        if sent == "park":  # it names no version, and sent again it finds nothing
            assert state.lease.version == believed.version
            again.leases[LANE] = state.lease
            assert again.park(parked(first)) == set()
            assert bench.parked() == [first.id]
            return
        assert state.lease.version == believed.version + 1
        again.leases[LANE] = believed._replace(hint=state.lease.hint)
        assert again.exchange().leases == {}  # what it believed is refused
        again.leases[LANE] = state.lease
        if sent == "renew":
            assert state.started == [first.id]
            assert again.exchange(finished=[first]).deleted == {first.id}
        else:  # deleted what had finished, and claimed what nobody was told of
            [second] = bench.deliveries()
            assert state.started == [second]
            assert ids(again.claim()) == [second]


class Cut:
    """Loses replies of one of the store's calls, with what they did committed or not."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        *,
        committed: bool,
        when: Callable[..., bool] = lambda *_: True,
    ) -> None:
        self.left = 0
        self.cuts = 0
        self.on = threading.Lock()
        call = getattr(PostgreSQLStore, name)

        def cut(store: Any, connection: Any, *arguments: Any, **options: Any) -> Any:
            with self.on:
                now = self.left > 0 and when(*arguments)
                if now:
                    self.left -= 1
                    self.cuts += 1
            if not now:
                return call(store, connection, *arguments, **options)
            if committed:
                call(store, connection, *arguments, **options)
            connection.connection.driver_connection.close()
            connection.invalidate()
            raise OperationalError(
                name, None, Exception("the reply is lost"), connection_invalidated=True
            )

        monkeypatch.setattr(PostgreSQLStore, name, cut)


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "not committed"])
@pytest.mark.parametrize("name", ["exchange", "park", "promote", "take", "relinquish", "enlist"])
def test_lost_replies(
    bus: RelayBus,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    committed: bool,
) -> None:
    """Nothing lost, nothing run twice, the order of keys kept, by one worker alone."""
    cut = Cut(monkeypatch, name, committed=committed)
    ledger, attempts = Runs(), Runs()

    @bus.handler("step", name="coroutine", retry=Fixed(wait=0.01))
    async def coroutine(event: Event, context: Context) -> None:
        attempts.add("coroutine", event.key, event.payload, context.attempt)
        if event.payload % 7 == 3 and context.attempt == 1:
            raise RuntimeError("once")
        await asyncio.sleep(0.002)
        ledger.add("coroutine", event.key, event.payload)

    @bus.handler("step", name="plain")
    def plain(event: Event, context: Context) -> None:
        attempts.add("plain", event.key, event.payload, context.attempt)
        ledger.add("plain", event.key, event.payload)

    settings = {"concurrency": 10, "prefetch": 10, "batch": 10, "lease_duration": 1.0}
    with working(bus, engine, lane_linger=0.05, **settings) as worker:
        for n in range(12):
            with Session(engine) as session, session.begin():
                for key in range(8):
                    bus.publish(session, "step", n, key=f"k{key}")
                bus.publish(session, "step", n)
            if n in (0, 7):
                with cut.on:
                    cut.left = 1 if n else 2
            if n % 4 == 1:
                eventually(lambda: ready(bus, engine) == 0)
                eventually(lambda: not held_lanes(bus, engine))
        drained(bus, engine)
        with cut.on:
            cut.left = 0
        assert worker.alive
        eventually(lambda: not held_lanes(bus, engine))
    assert cut.cuts >= 1, cut.cuts
    assert not dead(bus, engine)
    assert len(ledger) == len(set(ledger.rows)) == 2 * 12 * 9
    for handler in ("coroutine", "plain"):
        for key in range(8):
            mine = [row[2] for row in ledger.rows if row[:2] == (handler, f"k{key}")]
            assert mine == list(range(12)), (handler, key, mine)
        assert sorted(r[2] for r in ledger.rows if r[:2] == (handler, None)) == list(range(12))
    # a lost reply charges nobody
    assert {row[3] for row in attempts.rows if row[0] == "plain"} == {1}


def test_a_lost_reply_that_told_of_a_locked_row(
    bus: RelayBus, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The exchange stepped over one of two that it was to delete, and nobody was told which."""
    cut = Cut(monkeypatch, "exchange", committed=True, when=lambda _, request: request.careful)
    cut.left = 1
    runs, deliveries = Runs(), bus.tables.deliveries

    @bus.handler("step", name="h")
    def h(event: Event) -> None:
        runs.add(event.payload)
        runs.wait(2)  # both end, and are deleted, together
        begun.wait(LIMIT)

    begun = threading.Event()
    publish(bus, engine, "step", "locked", key=KEY)
    publish(bus, engine, "step", "free", key=OTHER_KEY)
    with working(bus, engine), engine.begin() as locking:
        runs.wait(2)
        locking.execute(select(deliveries).where(deliveries.c.key == KEY).with_for_update())
        begun.set()
        eventually(lambda: cut.cuts == 1)
        publish(bus, engine, "step", "later", key=OTHER_KEY)
        runs.wait(3)
        locking.rollback()
        drained(bus, engine)
    assert [row[0] for row in runs.rows[2:]] == ["later"]
    assert "its outcome was refused" not in caplog.text


def test_a_reply_cut_off_on_the_wire(bus: RelayBus, engine: Engine, short_path: Path) -> None:
    """The server commits an exchange whose answer never arrives, three times."""
    runs = Runs()

    @bus.handler("step", name="h")
    async def h(event: Event, context: Context) -> None:
        await asyncio.sleep(0.002)
        runs.add(event.key, event.payload, context.attempt)

    url = engine.url.render_as_string(hide_password=False)
    with proxy_to(url, short_path) as proxy, open_engine(proxy.url) as behind:
        with working(bus, behind, concurrency=5, prefetch=5, lane_linger=0.05, listen=False):
            for n in range(3):
                for each in range(20):
                    publish(bus, engine, "step", n * 20 + each, key=f"k{each % 4}")
                # a prepared statement is known by its name: its parameters hold the handler's
                proxy.cut_reply_to(b"{h}")
                drained(bus, engine)
                publish(bus, engine, "step", 1000 + n)
                drained(bus, engine)
        assert proxy.cuts >= 2
    assert sorted(row[1] for row in runs.rows) == [*range(60), 1000, 1001, 1002]
    assert {row[2] for row in runs.rows} == {1}
    for key in range(4):
        assert increasing([n for k, n, _ in runs.rows if k == f"k{key}"])


def test_the_pumps_connection_is_killed(
    bus: RelayBus, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Again and again, as a restart of a proxy does, and with it the listener's."""
    runs = Runs()
    caplog.set_level(logging.INFO)

    @bus.handler("step", name="h")
    async def h(event: Event) -> None:
        await asyncio.sleep(0.001)
        runs.add(event.key, event.payload)

    separate = create_engine(engine.url.update_query_dict({"application_name": "under test"}))
    kill = text(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE application_name = 'under test'"
    )
    total, killed = 0, 0
    with working(bus, separate) as worker:
        for n in range(60):
            publish(bus, engine, "step", n, key=f"k{n % 3}")
            total += 1
            if n % 12 == 5:
                with engine.connect() as connection:
                    killed += connection.scalar(kill) or 0
            time.sleep(0.01)
        drained(bus, engine)
        assert killed >= 5
        # listening again: noticed at once although polling is slow
        eventually(lambda: _listeners(engine) == 1)
        assert worker.alive
    separate.dispose()
    assert sorted(row[1] for row in runs.rows) == list(range(60))
    for key in range(3):
        assert increasing([n for k, n in runs.rows if k == f"k{key}"])
    assert "Traceback" not in caplog.text


def increasing(rows: list[Any]) -> bool:
    return all(a < b for a, b in itertools.pairwise(rows))


def _listeners(engine: Engine) -> int:
    query = text(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE application_name = 'under test' AND query LIKE 'LISTEN%'"
    )
    with engine.connect() as connection:
        return connection.scalar(query) or 0


# -- a database that is away -----------------------------------------------------------------------


@pytest.fixture
def own_server() -> Iterator[PrivatePostgres]:
    """A server that may be stopped."""
    with private_postgres(SETTINGS) as server:
        yield server


def test_the_database_goes_away_and_comes_back(
    app: Path, bus: RelayBus, own_server: PrivatePostgres
) -> None:
    """It is waited for, without a flood of messages, and nothing is lost."""
    url = own_server.create_database("shop")
    with open_engine(url) as engine, worker_process(app, *QUICK, "--setup", url=url) as worker:
        worker.until_started()
        sent = 0
        for how in ("immediate", "fast"):
            for _ in range(20):
                publish(bus, engine, "quick", sent, key=f"k{sent % 3}")
                sent += 1
            publish(bus, engine, "slow", 1)
            worker.until(lambda: noted(app, "began", 1))
            own_server.stop(how)
            worker.until(lambda: "the database failed" in worker.output)
            time.sleep(1)
            own_server.start()
            engine.dispose()
            expected = set(range(sent))
            worker.until(
                lambda: {int(row[2]) for row in noted(app, "quick")} == expected  # noqa: B023
            )
            drained(bus, engine)
        assert worker.output.count("the database failed") < 30
        assert "Traceback" not in worker.output
        assert terminated(worker) == 0
        assert not held_lanes(bus, engine)
    for key in range(3):
        first = dict.fromkeys(int(row[2]) for row in noted(app, "quick", f"k{key}"))
        assert list(first) == sorted(first)
