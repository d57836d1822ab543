"""A transactional handler whose session is REPEATABLE READ or SERIALIZABLE.

Whatever statement PostgreSQL finds out a conflict in, it is nobody's failure: the delivery is tried
again, uncharged, and is told neither as lost nor as an attempt.
"""

from __future__ import annotations

import logging

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlalchemy_relaybus import Context, Event, Fixed, NoRetry, RelayBus
from tests.support.effects import INSERT, written
from tests.support.stores import key_on
from tests.support.workers import Runs, dead, drained, publish, steal, working

LANE = 7
KEY = key_on(LANE)
LEVEL = "SERIALIZABLE"
COUNT = text("SELECT count(*) FROM effects")
RENEWAL = text(f"UPDATE relaybus_lanes SET holder = holder WHERE lane = {LANE}")


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus()


def skew(engine: Engine) -> None:
    """Read what the handler writes, write what it has read, and commit first."""
    with engine.execution_options(isolation_level=LEVEL).begin() as connection:
        connection.execute(COUNT)
        connection.execute(INSERT, {"n": 0, "what": "other"})


@pytest.mark.parametrize("kind", ["Session", "AsyncSession"])
@pytest.mark.parametrize("moment", ["handler", "completion", "commit"])
def test_a_serialization_failure_is_tried_again_uncharged(
    bus: RelayBus,
    effects: Engine,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    moment: str,
) -> None:
    runs = Runs()
    at = [moment]

    def meet(moment: str) -> None:
        if at == [moment]:
            at.clear()
            skew(effects)

    def work(session: Session, attempt: int) -> None:
        session.execute(COUNT)  # the snapshot
        runs.add(attempt)
        meet("handler")
        session.execute(INSERT, {"n": attempt, "what": "handler"})
        meet("completion")

    if kind == "Session":
        engine = effects.execution_options(isolation_level=LEVEL)
        event.listen(engine, "commit", lambda connection: meet("commit"))

        @bus.handler(
            "step",
            name="h",
            mode="transactional",
            retry=NoRetry(),
            session_factory=sessionmaker(engine),
        )
        def plain(event: Event, context: Context, session: Session) -> None:
            work(session, context.attempt)

    else:
        async_engine = create_async_engine(effects.url, isolation_level=LEVEL)
        event.listen(async_engine.sync_engine, "commit", lambda connection: meet("commit"))

        @bus.handler(
            "step",
            name="h",
            mode="transactional",
            retry=NoRetry(),
            session_factory=async_sessionmaker(async_engine),
        )
        async def coroutine(event: Event, context: Context, session: AsyncSession) -> None:
            await session.run_sync(work, context.attempt)

    publish(bus, effects, "step", 1, key=KEY)
    with caplog.at_level(logging.WARNING, "sqlalchemy_relaybus"), working(bus, effects):
        drained(bus, effects)
    assert runs.rows == [(1,), (1,)]
    assert written(effects) == [(0, "other"), (1, "handler")]
    assert not dead(bus, effects)
    assert "could not be serialized with another one: could not serialize access" in caplog.text
    assert "not held by this worker" not in caplog.text


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("what", ["renewal", "takeover"])
def test_the_lane_is_written_during_the_transaction(
    bus: RelayBus, effects: Engine, caplog: pytest.LogCaptureFixture, level: str, what: str
) -> None:
    """A renewal is no conflict. A takeover is, and nothing is written about the delivery then."""
    runs = Runs()

    @bus.handler(
        "step",
        name="h",
        mode="transactional",
        session_factory=sessionmaker(effects.execution_options(isolation_level=level)),
    )
    def h(event: Event, context: Context, session: Session) -> None:
        session.execute(INSERT, {"n": context.attempt, "what": "x"})
        if runs.add(context.attempt) > 1:
            return
        if what == "takeover":
            steal(bus, effects, {LANE}, seconds=0.2)
        else:
            with effects.begin() as other:
                other.execute(RENEWAL)

    publish(bus, effects, "step", 1, key=KEY)
    with caplog.at_level(logging.WARNING, "sqlalchemy_relaybus"), working(bus, effects):
        drained(bus, effects)
    assert runs.rows == [(1,)] * (2 if what == "takeover" else 1)
    assert written(effects) == [(1, "x")]
    assert ("not held by this worker" in caplog.text) == (what == "takeover")


def test_a_plain_handlers_transactions_are_its_own(bus: RelayBus, effects: Engine) -> None:
    """What fails there counts an attempt: what it did besides is not undone."""
    runs = Runs()

    @bus.handler("step", name="h", retry=Fixed(wait=0.02, max_attempts=2))
    def h(event: Event, context: Context) -> None:
        runs.add(context.attempt)
        with effects.begin() as connection:
            connection.execute(text("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$"))

    publish(bus, effects, "step", 1, key=KEY)
    with working(bus, effects):
        drained(bus, effects)
    assert runs.rows == [(1,), (2,)]
    assert len(dead(bus, effects)) == 1
