"""Handlers' outcomes, and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy_relaybus import (
    ConfigurationError,
    SchemaMissingError,
    SchemaVersionError,
)

from .case import Case

CASES: Mapping[str, Sequence[Case]] = {
    "Outcomes of handlers": [
        Case(
            "trying again after a text",
            'raise Retry("5")',
            ConfigurationError,
            (
                "Retry: after must be a timedelta or a number of seconds from 0 to "
                "3155760000 (100 years), not '5'"
            ),
        ),
        Case(
            "trying again before now",
            "raise Retry(-5)",
            ConfigurationError,
            (
                "Retry: after must be a timedelta or a number of seconds from 0 to "
                "3155760000 (100 years), not -5"
            ),
        ),
        Case(
            "a snooze without end",
            "raise Snooze(math.inf)",
            ConfigurationError,
            (
                "Snooze: after must be a timedelta or a number of seconds from 0 to "
                "3155760000 (100 years), not inf"
            ),
        ),
        Case(
            "a snooze of more digits than a float has",
            "raise Snooze(10**400)",
            ConfigurationError,
            (
                "Snooze: after must be a timedelta or a number of seconds from 0 to "
                "3155760000 (100 years), not "
                "1000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000...00000000000000000"
            ),
        ),
    ],
    "Workers": [
        Case(
            "a stop with a grace that is no number",
            'Worker(bus, engine).stop("soon")',
            ConfigurationError,
            (
                "stop(): grace must be a timedelta or a number of seconds from 0 to "
                "3155760000 (100 years), not 'soon'"
            ),
        ),
        Case(
            "a bus without handlers",
            "Worker(RelayBus(), engine)",
            ConfigurationError,
            (
                "the bus has no handlers, so a worker has nothing to do; import the modules that "
                "register them before"
            ),
        ),
        Case(
            "an AsyncEngine",
            "Worker(bus, async_engine)",
            TypeError,
            (
                "a worker needs a synchronous Engine, not "
                "<sqlalchemy.ext.asyncio.engine.AsyncEngine object at 0x...>; an AsyncEngine is "
                "given beside it, as async_engine="
            ),
        ),
        Case(
            "an AsyncSession that comes from nowhere",
            (
                '@bus.handler("order.placed", name="stock", mode="transactional")\n'
                "async def reserve(event: Event, session: AsyncSession): ...\n"
                "Worker(bus, engine)"
            ),
            ConfigurationError,
            (
                "handler 'stock' takes an AsyncSession: give Worker(async_engine=...), "
                "or the handler or the bus session_factory=async_sessionmaker(...)"
            ),
        ),
        Case(
            "an unknown setting",
            "Worker(bus, engine, threds=4)",
            ConfigurationError,
            (
                "there is no setting 'threds'; the settings are concurrency, threads, "
                "batch, prefetch, pool_size, poll_interval, max_poll_interval, "
                "lease_duration, completion_window, grace, lane_linger, owner, setup, "
                "listen"
            ),
        ),
        Case(
            "a setting out of its bounds",
            "Worker(bus, engine, threads=0)",
            ConfigurationError,
            (
                "setting threads (--threads, RELAYBUS_THREADS) is 0; it must be a whole "
                "number, 1 to 1000"
            ),
        ),
        Case(
            "a database without the tables",
            "Worker(bus, engine).run()",
            SchemaMissingError,
            (
                "the database has no table 'relaybus_schema_version'; create the tables "
                "with 'relaybus migrate upgrade --url URL'"
            ),
            database="empty",
        ),
        Case(
            "tables of a newer release",
            "Worker(bus, engine).run()",
            SchemaVersionError,
            (
                "the database's relaybus schema is version 3, newer than the version 2 "
                "that this release works with; install a newer sqlalchemy-relaybus, or "
                "downgrade the schema with it"
            ),
            database="newer",
        ),
        Case(
            "the same worker twice",
            ("worker = Worker(bus, engine)\nworker.stop(); worker.run()\nworker.run()"),
            RuntimeError,
            "a worker runs once; make another one",
            database="migrated",
        ),
    ],
    "Dead letters and blocked keys": [
        Case(
            "an engine",
            "admin.dead_letters(engine, bus)",
            ConfigurationError,
            (
                "this takes a Connection, not Engine(postgresql+psycopg:///shop); use one of "
                "engine.begin(), or session.connection(), or of an asynchronous connection or "
                "session the one that run_sync() gives"
            ),
        ),
        Case(
            "a session",
            "admin.requeue(session, bus, [7])",
            ConfigurationError,
            (
                "this takes a Connection, not <sqlalchemy.orm.session.Session object at 0x...>; "
                "use one of engine.begin(), or session.connection(), or of an asynchronous "
                "connection or session the one that run_sync() gives"
            ),
        ),
        Case(
            "no bus",
            "connection = engine.connect()\nadmin.blocked_keys(connection, None)",
            ConfigurationError,
            "bus must be a RelayBus or its tables, not None",
            database="migrated",
        ),
        Case(
            "ids as text",
            'connection = engine.connect()\nadmin.requeue(connection, bus, ["7"])',
            ConfigurationError,
            "ids must be whole numbers, such as letter.id, not '7'",
            database="migrated",
        ),
        Case(
            "dead letters instead of their ids",
            (
                "connection = engine.connect()\n"
                'letter = admin.DeadLetter(7, None, "mail", None, 1, None, None, False)\n'
                "admin.discard(connection, bus, [letter])"
            ),
            ConfigurationError,
            (
                "ids must be whole numbers, such as letter.id, not DeadLetter(id=7, "
                "event_id=None, handler='mail', key=None, attempts=1, last_error=None, "
                "since=None, blocks=False)"
            ),
            database="migrated",
        ),
        Case(
            "one id instead of a list",
            "connection = engine.connect()\nadmin.discard(connection, bus, 7)",
            ConfigurationError,
            "ids must be a list of whole numbers, as [letter.id], not 7",
            database="migrated",
        ),
        Case(
            "a text instead of a list",
            'connection = engine.connect()\nadmin.discard(connection, bus, "17")',
            ConfigurationError,
            "ids must be a list of whole numbers, as [letter.id], not '17'",
            database="migrated",
        ),
        Case(
            "no key",
            'connection = engine.connect()\nadmin.release(connection, bus, "mail.confirm", None)',
            ConfigurationError,
            "key must be a str, as the event has it, not None",
            database="migrated",
        ),
        Case(
            "a limit of nothing",
            "connection = engine.connect()\nadmin.dead_letters(connection, bus, limit=0)",
            ConfigurationError,
            "limit must be a whole number from 1, not 0",
            database="migrated",
        ),
        Case(
            "a page that goes on after an id",
            "connection = engine.connect()\nadmin.dead_letters(connection, bus, after=7)",
            ConfigurationError,
            "after must be the last DeadLetter of the page before, not 7",
            database="migrated",
        ),
        Case(
            "a database without the tables",
            "connection = engine.connect()\nadmin.dead_letters(connection, bus)",
            SchemaMissingError,
            (
                "the database has no table 'relaybus_schema_version'; create the tables "
                "with 'relaybus migrate upgrade --url URL'"
            ),
            database="empty",
        ),
    ],
}
