"""Publishers that repeat themselves, workers and a purge at once: each event runs as often as it
is stored, and no delivery is left without its event."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, create_engine, func, insert, select, text
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import PurgeResult, RelayBus, purge
from tests.support.workers import dead, drained, worker_process

THREADS, IDS, TIMES = 64, 500, 6
HOUR = timedelta(hours=1)

APP = """
from sqlalchemy_relaybus import Event, RelayBus

bus = RelayBus()

@bus.handler("test.happened", name="a")
async def a(event: Event):
    note("a", event)

@bus.handler("test.happened", name="b")
async def b(event: Event):
    note("b", event)

def note(handler, event):
    with open("ledger", "a") as file:
        file.write(f"{event.id} {handler}\\n")
"""

#: Which handlers an event was given a delivery for, when it was stored and later.
_LEDGER = """
CREATE TABLE given (id uuid NOT NULL, handler text NOT NULL);

CREATE FUNCTION note_given() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO given
    SELECT new.id, unnest(new.handlers[CASE TG_OP WHEN 'UPDATE' THEN cardinality(old.handlers)
      ELSE 0 END + 1 :]);
  RETURN NULL;
END $$;

CREATE TRIGGER note_given AFTER INSERT OR UPDATE OF handlers ON relaybus_events
  FOR EACH ROW EXECUTE FUNCTION note_given()
"""


@pytest.fixture
def publishers(database_url: str) -> Iterator[Engine]:
    """An engine with a connection for every publisher."""
    engine = create_engine(database_url, pool_size=THREADS)
    yield engine
    engine.dispose()


@pytest.fixture
def given(engine: Engine) -> None:
    with engine.begin() as connection:
        for statement in _LEDGER.split(";\n\n"):
            connection.execute(text(statement))


def bus_to(*handlers: str) -> RelayBus:
    bus = RelayBus(wake=False)
    bus.route("test.happened", to=handlers)
    return bus


#: An older release of an application, whose events "b" is not interested in yet, beside a newer
#: one: only what adds a handler to a stored event can leave a delivery behind.
OLDER, NEWER = bus_to("a"), bus_to("a", "b")


@contextmanager
def working(directory: Path, url: str) -> Iterator[None]:
    """Two worker processes."""
    (directory / "app.py").write_text(APP)
    with ExitStack() as stack:
        for _ in range(2):
            quick = ("--poll-interval", "0.01", "--max-poll-interval", "0.1", "--grace", "10")
            stack.enter_context(worker_process(directory, *quick, url=url)).until_started()
        yield


def publish_again_and_again(engine: Engine, ids: list[UUID], *, old_ones: bool) -> int:
    """Each id several times from each release, in any order, by all threads at once.

    With *old_ones* there is an old event that is done for every other one; how many.
    """
    work = [(bus, id) for id in ids for bus in (OLDER, NEWER) for _ in range(TIMES // 2)]
    random.Random(7).shuffle(work)
    latch = threading.Barrier(THREADS)
    events = NEWER.tables.events

    def run(thread: int) -> int:
        latch.wait(30)
        count = 0
        for n, (bus, id) in enumerate(work[thread::THREADS]):
            with Session(engine) as session, session.begin():
                bus.publish(session, "test.happened", {}, id=id)
                if old_ones and n % 2:
                    old = {"id": uuid4(), "type": "old", "payload": "{}", "handlers": []}
                    moment = func.clock_timestamp() - 2 * HOUR
                    session.execute(insert(events).values(created_at=moment, **old))
                    count += 1
        return count

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(run, range(THREADS)))


@contextmanager
def purging(engine: Engine, age: timedelta) -> Iterator[list[PurgeResult]]:
    """Purge in a thread, over and over, and once more in the end; what was removed each time."""
    results: list[PurgeResult] = []
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            results.append(purge(engine, NEWER, events_older_than=age, batch=50))

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)
        try:
            yield results
        finally:
            ended.set()
            future.result()
    results.append(purge(engine, NEWER, events_older_than=age))


def runs(directory: Path) -> Counter[tuple[str, ...]]:
    return Counter(tuple(line.split()) for line in (directory / "ledger").read_text().splitlines())


def test_what_is_published_again_within_its_retention_runs_once(
    engine: Engine, publishers: Engine, database_url: str, tmp_path: Path
) -> None:
    ids = [uuid4() for _ in range(IDS)]
    with working(tmp_path, database_url):
        with purging(engine, HOUR) as purges:
            old = publish_again_and_again(publishers, ids, old_ones=True)
        drained(NEWER, engine)
    assert runs(tmp_path) == {(str(id), handler): 1 for id in ids for handler in ("a", "b")}
    assert dead(NEWER, engine) == []
    # and the purge was not idle meanwhile
    assert sum(result.events for result in purges) == old
    assert sum(result.events for result in purges[:-1]) > old / 4
    with engine.connect() as connection:
        assert set(connection.scalars(select(NEWER.tables.events.c.id))) == set(ids)


def test_what_is_purged_at_once_and_published_again_runs_as_often_as_it_is_stored(
    engine: Engine, publishers: Engine, given: None, database_url: str, tmp_path: Path
) -> None:
    ids = [uuid4() for _ in range(IDS)]
    with working(tmp_path, database_url):
        with purging(engine, timedelta()) as purges:
            publish_again_and_again(publishers, ids, old_ones=False)
            drained(NEWER, engine)
    assert [letter.last_error for letter in dead(NEWER, engine)] == []
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT id::text, handler FROM given"))
        deliveries = Counter(tuple(row) for row in rows)
        assert connection.scalar(select(func.count()).select_from(NEWER.tables.events)) == 0
    assert runs(tmp_path) == deliveries
    # many of them were stored, run and purged more than once
    assert deliveries.total() > 3 * IDS
    assert sum(result.events for result in purges) > 1.5 * IDS
