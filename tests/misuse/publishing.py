"""Getting an event into a transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy_relaybus import (
    ConfigurationError,
    InvalidEventError,
    PayloadError,
    SchemaMissingError,
    UnroutedEventError,
)

from .case import Case

CASES: Mapping[str, Sequence[Case]] = {
    "Publishing: on what": [
        Case(
            "an engine",
            'bus.publish(engine, "order.placed", {})',
            TypeError,
            (
                "cannot publish on Engine(postgresql+psycopg:///shop): give a Session, "
                "an AsyncSession, a scoped session of either, or a Connection"
            ),
        ),
        Case(
            "a sessionmaker instead of a session",
            'bus.publish(sessionmaker(engine), "order.placed", {})',
            TypeError,
            (
                "cannot publish on sessionmaker(class_='Session', "
                "bind=Engine(postgresql+psycopg:///shop), autoflush=True, "
                "expire_on_commit=True): give a Session, an AsyncSession, a scoped "
                "session of either, or a Connection"
            ),
        ),
        Case(
            "an AsyncConnection",
            'bus.publish(async_engine.connect(), "order.placed", {})',
            TypeError,
            (
                "cannot publish on <sqlalchemy.ext.asyncio.engine.AsyncConnection object "
                "at 0x...>: give a Session, an AsyncSession, a scoped session of either, "
                "or a Connection; for an AsyncConnection: await "
                "bus.publish_async(connection, ...)"
            ),
        ),
        Case(
            "publish_async on anything else",
            'await bus.publish_async(AsyncSession(async_engine), "order.placed", {})',
            TypeError,
            (
                "publish_async() is for an AsyncConnection, not "
                "<sqlalchemy.ext.asyncio.session.AsyncSession object at 0x...>; "
                "publish() takes everything else, an AsyncSession included"
            ),
        ),
        Case(
            "a session on an AUTOCOMMIT engine",
            (
                "session = "
                'Session(engine.execution_options(isolation_level="AUTOCOMMIT"))\n'
                'bus.publish(session, "order.placed", {})\n'
                "session.commit()"
            ),
            ConfigurationError,
            (
                "the connection is in AUTOCOMMIT mode, where a rollback would keep the "
                "event; publish on a connection with a transaction"
            ),
            database="migrated",
        ),
        Case(
            "a connection in AUTOCOMMIT mode",
            (
                "connection = "
                'engine.connect().execution_options(isolation_level="AUTOCOMMIT")\n'
                'bus.publish(connection, "order.placed", {})'
            ),
            ConfigurationError,
            (
                "the connection is in AUTOCOMMIT mode, where a rollback would keep the "
                "event; publish on a connection with a transaction"
            ),
            database="migrated",
        ),
        Case(
            "a bus detached from a session in which an event waits",
            (
                "bus.attach(session)\n"
                'bus.publish(session, "order.placed", {})\n'
                "bus.detach(session)\n"
                "session.commit()"
            ),
            ConfigurationError,
            (
                "an event waits in a session that its bus has been detached from, or was "
                "moved to another session; flush before you detach, and publish on the "
                "session that commits"
            ),
            database="migrated",
        ),
        Case(
            "a session without an engine",
            ('session = Session()\nbus.publish(session, "order.placed", {})\nsession.commit()'),
            ConfigurationError,
            (
                "the session is bound to no engine for the bus's tables; bind one in "
                "general, or these tables: Session(binds={bus.tables.events: engine, ...})"
            ),
        ),
        Case(
            "a session with an engine for other tables only",
            (
                "session = Session(binds={Order: engine})\n"
                'bus.publish(session, "order.placed", {})\n'
                "session.commit()"
            ),
            ConfigurationError,
            (
                "the session is bound to no engine for the bus's tables; bind one in "
                "general, or these tables: Session(binds={bus.tables.events: engine, ...})"
            ),
        ),
        Case(
            "a database without the tables",
            ('bus.publish(session, "order.placed", {})\nsession.commit()'),
            SchemaMissingError,
            (
                "the database has no table 'relaybus_events'; create the tables with "
                "'relaybus migrate upgrade --url URL'"
            ),
            database="empty",
        ),
        Case(
            "a database that the library has no store for",
            (
                'session = Session(create_engine("sqlite://"))\n'
                'bus.publish(session, "order.placed", {})\n'
                "session.commit()"
            ),
            ConfigurationError,
            ("there is no store for 'sqlite' databases; this release works with postgresql"),
        ),
        Case(
            "an event that no handler takes",
            'bus.publish(session, "order.shipped", {})',
            UnroutedEventError,
            (
                "no handler takes events of type 'order.shipped'; register one with "
                "@bus.handler('order.shipped', name=...), or keep such events with "
                'RelayBus(unrouted="store")'
            ),
        ),
    ],
    "Publishing: type, key, id, headers": [
        Case(
            "no type",
            'bus.publish(session, "", {})',
            InvalidEventError,
            "event type: must not be empty",
        ),
        Case(
            "a type that is no text",
            "bus.publish(session, 7, {})",
            InvalidEventError,
            "event type: must be a str, not an int",
        ),
        Case(
            "a type with a blank",
            'bus.publish(session, "order placed", {})',
            InvalidEventError,
            (
                "event type: 'order placed' contains white space, a control character or "
                'a lone surrogate; use a name such as "order.placed"'
            ),
        ),
        Case(
            "a type of 201 characters",
            'bus.publish(session, "o" * 201, {})',
            InvalidEventError,
            "event type: has 201 characters, 200 are allowed",
        ),
        Case(
            "a key that is no text",
            'bus.publish(session, "order.placed", {}, key=42)',
            InvalidEventError,
            "event key: must be a str or None, not an int; convert it, e.g. str(key)",
        ),
        Case(
            "an empty key",
            'bus.publish(session, "order.placed", {}, key="")',
            InvalidEventError,
            "event key: must not be empty; give None for an event without order",
        ),
        Case(
            "a key with NUL",
            'bus.publish(session, "order.placed", {}, key="a\\0b")',
            InvalidEventError,
            "event key: 'a\\x00b' contains NUL, which databases do not store; remove it",
        ),
        Case(
            "a key of more than 1,024 bytes",
            'bus.publish(session, "order.placed", {}, key="k" * 4000)',
            InvalidEventError,
            (
                "event key: has 4000 bytes in UTF-8, 1024 are allowed (an index row of "
                "PostgreSQL holds 2704, for key and handler); use a digest of it, e.g. "
                "hashlib.sha256(key.encode()).hexdigest()"
            ),
        ),
        Case(
            "an id that is neither UUID nor text",
            'bus.publish(session, "order.placed", {}, id=7)',
            InvalidEventError,
            "event id: must be a UUID or a str, not an int; convert it, e.g. str(id)",
        ),
        Case(
            "an empty id",
            'bus.publish(session, "order.placed", {}, id="")',
            InvalidEventError,
            "event id: must not be empty; leave it out to have one made",
        ),
        Case(
            "an id with NUL",
            'bus.publish(session, "order.placed", {}, id="a\\0b")',
            InvalidEventError,
            "event id: 'a\\x00b' contains NUL, which databases do not store; remove it",
        ),
        Case(
            "headers that are no mapping",
            'bus.publish(session, "order.placed", {}, headers=["trace"])',
            InvalidEventError,
            "event headers: must be a mapping of str to str or None, not a list",
        ),
        Case(
            "the same beside a text id",
            'bus.publish(session, "order.placed", {}, headers=["trace"], id="order-7")',
            InvalidEventError,
            "event headers: must be a mapping of str to str or None, not a list",
        ),
        Case(
            "a header that is no text",
            'bus.publish(session, "order.placed", {}, headers={"trace": 7})',
            InvalidEventError,
            (
                "event headers: the value of 'trace' must be a str, not an int; convert "
                "it first, e.g. str(value)"
            ),
        ),
        Case(
            "a header without a name",
            'bus.publish(session, "order.placed", {}, headers={"": "7"})',
            InvalidEventError,
            "event headers: a name must be a str that is not empty, not ''",
        ),
        Case(
            "a header with NUL",
            'bus.publish(session, "order.placed", {}, headers={"trace": "\\0"})',
            InvalidEventError,
            (
                "event headers: value of 'trace' contains NUL, which databases do not "
                "store; remove it"
            ),
        ),
    ],
    "Publishing: when": [
        Case(
            "a negative delay",
            'bus.publish(session, "order.placed", {}, delay=-1)',
            InvalidEventError,
            (
                "event delay: must be a timedelta or a number of seconds from 0 to "
                "3155760000 (100 years), not -1"
            ),
        ),
        Case(
            "a delay as text",
            'bus.publish(session, "order.placed", {}, delay="5")',
            InvalidEventError,
            (
                "event delay: must be a timedelta or a number of seconds from 0 to "
                "3155760000 (100 years), not '5'"
            ),
        ),
        Case(
            "a delay as bool",
            'bus.publish(session, "order.placed", {}, delay=True)',
            InvalidEventError,
            (
                "event delay: must be a timedelta or a number of seconds from 0 to "
                "3155760000 (100 years), not True"
            ),
        ),
        Case(
            "a delay that is no number",
            'bus.publish(session, "order.placed", {}, delay=math.nan)',
            InvalidEventError,
            (
                "event delay: must be a timedelta or a number of seconds from 0 to "
                "3155760000 (100 years), not nan"
            ),
        ),
        Case(
            "a delay of more than 100 years",
            'bus.publish(session, "order.placed", {}, delay=timedelta(days=40_000))',
            InvalidEventError,
            (
                "event delay: must be a timedelta or a number of seconds from 0 to "
                "3155760000 (100 years), not datetime.timedelta(days=40000)"
            ),
        ),
        Case(
            "a moment without a time zone",
            ('bus.publish(session, "order.placed", {}, available_at=datetime(2030, 1, 1))'),
            InvalidEventError,
            (
                "event available_at: 2030-01-01 00:00:00 has no time zone; give it one, "
                "e.g. moment.replace(tzinfo=timezone.utc)"
            ),
        ),
        Case(
            "a moment as text",
            'bus.publish(session, "order.placed", {}, available_at="tomorrow")',
            InvalidEventError,
            (
                "event available_at: must be a datetime with a time zone, not "
                "'tomorrow'; for seconds from now there is delay"
            ),
        ),
        Case(
            "a moment beyond 100 years",
            (
                'bus.publish(session, "order.placed", {}, available_at=datetime(9999, '
                "12, 31, tzinfo=UTC))"
            ),
            InvalidEventError,
            (
                "event available_at: 9999-12-31 00:00:00+00:00 is more than 100 years "
                "from now; leave it out for an event that is available at once"
            ),
        ),
        Case(
            "a delay and a moment",
            ('bus.publish(session, "order.placed", {}, delay=5, available_at=datetime.now(UTC))'),
            InvalidEventError,
            "event delay: give either a delay or available_at, not both",
        ),
    ],
    "Publishing: payloads": [
        Case(
            "NUL in a value",
            'bus.publish(session, "order.placed", {"lines": ["a\\0b"]})',
            PayloadError,
            (
                'payload["lines"][0]: the string contains NUL (character 1), which '
                'databases do not store; remove it, e.g. value.replace("\\0", "")'
            ),
        ),
        Case(
            "NUL in a name",
            'bus.publish(session, "order.placed", {"lines": {"a\\0b": 1}})',
            PayloadError,
            (
                "payload[\"lines\"]: the key 'a\\x00b' contains NUL (character 1), which "
                'databases do not store; remove it, e.g. value.replace("\\0", "")'
            ),
        ),
        Case(
            "a lone surrogate",
            'bus.publish(session, "order.placed", {"name": "\\ud800"})',
            PayloadError,
            (
                'payload["name"]: the string contains a lone surrogate (character 0), '
                'which has no UTF-8 form; repair it, e.g. value.encode("utf-8", '
                '"replace").decode()'
            ),
        ),
        Case(
            "a Decimal",
            'bus.publish(session, "order.placed", {"total": Decimal("9.90")})',
            PayloadError,
            (
                'payload["total"]: a Decimal is not plain JSON data; convert it first, '
                "e.g. str(value)"
            ),
        ),
        Case(
            "a datetime with a time zone",
            'bus.publish(session, "order.placed", {"at": datetime.now(UTC)})',
            PayloadError,
            (
                'payload["at"]: a datetime is not plain JSON data; convert it first, '
                "e.g. value.isoformat()"
            ),
        ),
        Case(
            "a datetime without one",
            'bus.publish(session, "order.placed", {"at": datetime.now()})',
            PayloadError,
            (
                'payload["at"]: a datetime is not plain JSON data; convert it first, '
                "e.g. value.isoformat()"
            ),
        ),
        Case(
            "a date",
            'bus.publish(session, "order.placed", {"on": date.today()})',
            PayloadError,
            (
                'payload["on"]: a date is not plain JSON data; convert it first, e.g. '
                "value.isoformat()"
            ),
        ),
        Case(
            "a UUID",
            'bus.publish(session, "order.placed", {"id": uuid.uuid4()})',
            PayloadError,
            ('payload["id"]: a UUID is not plain JSON data; convert it first, e.g. str(value)'),
        ),
        Case(
            "a member of an Enum",
            ('bus.publish(session, "order.placed", {"state": Enum("State", "PAID").PAID})'),
            PayloadError,
            (
                'payload["state"]: a State is not plain JSON data; convert it first, '
                "e.g. value.value"
            ),
        ),
        Case(
            "bytes",
            'bus.publish(session, "order.placed", {"photo": b"..."})',
            PayloadError,
            (
                'payload["photo"]: a bytes is not plain JSON data; convert it first, '
                "e.g. base64.b64encode(value).decode()"
            ),
        ),
        Case(
            "a set",
            'bus.publish(session, "order.placed", {"tags": {"new"}})',
            PayloadError,
            ('payload["tags"]: a set is not plain JSON data; convert it first, e.g. list(value)'),
        ),
        Case(
            "a tuple",
            'bus.publish(session, "order.placed", {"size": (2, 3)})',
            PayloadError,
            ('payload["size"]: a tuple is not plain JSON data; convert it first, e.g. list(value)'),
        ),
        Case(
            "a dict with int keys",
            'bus.publish(session, "order.placed", {"amounts": {7: 2}})',
            PayloadError,
            (
                'payload["amounts"]: the key 7 is an int, and JSON has str keys only; '
                "convert it first, e.g. str(key)"
            ),
        ),
        Case(
            "NaN",
            'bus.publish(session, "order.placed", {"rate": math.nan})',
            PayloadError,
            ('payload["rate"]: JSON has no nan; leave it out, or convert it first, e.g. to None'),
        ),
        Case(
            "an int of more than 640 digits",
            'bus.publish(session, "order.placed", {"n": 10**640})',
            PayloadError,
            (
                'payload["n"]: the int has more than 640 decimal digits, which not every '
                "reader parses; convert it first, e.g. hex(value)"
            ),
        ),
        Case(
            "a dataclass",
            (
                "@dataclass\n"
                "class Line: n: int\n"
                'bus.publish(session, "order.placed", {"lines": [Line(1)]})'
            ),
            PayloadError,
            (
                'payload["lines"][0]: a Line is not plain JSON data; convert it first, '
                "e.g. dataclasses.asdict(value)"
            ),
        ),
        Case(
            "a mapped object",
            'bus.publish(session, "order.placed", Order(id=7))',
            PayloadError,
            (
                "payload: an Order is not plain JSON data; convert it first, e.g. a dict "
                'of the columns that matter, {"id": value.id, ...}'
            ),
        ),
        Case(
            "a list that contains itself",
            (
                "lines = []; lines.append(lines)\n"
                'bus.publish(session, "order.placed", {"lines": lines})'
            ),
            PayloadError,
            (
                'payload["lines"][0]: this list contains itself; JSON has no cycles, so '
                "break it first"
            ),
        ),
        Case(
            "nested more than 200 deep",
            (
                "lines = functools.reduce(lambda inner, _: [inner], range(200), [])\n"
                'bus.publish(session, "order.placed", lines)'
            ),
            PayloadError,
            (
                "payload[0][0][0][0][0][0][0][0][0][0][0]...0][0][0][0][0][0]: lists and "
                "dicts nest deeper than 200; flatten the payload, or store the document "
                "elsewhere and publish a reference to it"
            ),
        ),
    ],
    "Attaching": [
        Case(
            "an engine",
            "bus.attach(engine)",
            ConfigurationError,
            (
                "cannot attach to Engine(postgresql+psycopg:///shop): give a "
                "sessionmaker or async_sessionmaker, a scoped session over one, a "
                "Session class or a session"
            ),
        ),
        Case(
            "the AsyncSession class",
            "bus.attach(AsyncSession)",
            ConfigurationError,
            (
                "cannot attach to <class 'sqlalchemy.ext.asyncio.session.AsyncSession'>: "
                "give a sessionmaker or async_sessionmaker, a scoped session over one, a "
                "Session class or a session"
            ),
        ),
        Case(
            "a scoped_session over a function",
            "bus.attach(scoped_session(lambda: Session(engine)))",
            ConfigurationError,
            (
                "cannot attach to <function <lambda> at 0x...>: give a sessionmaker or "
                "async_sessionmaker, a scoped session over one, a Session class or a "
                "session"
            ),
        ),
    ],
    "Objects that are recorded": [
        Case(
            "an object that is in no session",
            'bus.record(Order(id=7), "order.placed", {})',
            ConfigurationError,
            ("<Order 7> is in no session; add it to one before recording an event about it"),
        ),
        Case(
            "an object that is not mapped",
            'bus.record(object(), "order.placed", {})',
            ConfigurationError,
            (
                "<object object at 0x...> is no object of a mapped class; publish on a "
                "session instead: bus.publish(session, ...)"
            ),
        ),
        Case(
            "an event that no handler takes",
            ('order = Order(id=7); session.add(order)\nbus.record(order, "order.shipped", {})'),
            UnroutedEventError,
            (
                "no handler takes events of type 'order.shipped'; register one with "
                "@bus.handler('order.shipped', name=...), or keep such events with "
                'RelayBus(unrouted="store")'
            ),
        ),
        Case(
            "an object that is taken out before it has its key",
            (
                "order = Order(); session.add(order)\n"
                'bus.record(order, "order.placed", lambda order: {"id": order.id})\n'
                "session.expunge(order)\n"
                "session.commit()"
            ),
            ConfigurationError,
            (
                "<Order None> has no primary key, and the event about it waits for that: it was "
                "taken out of its session before a flush; publish on the session instead"
            ),
            database="migrated",
        ),
        Case(
            "a payload function that gives something else",
            (
                "Order.metadata.create_all(engine)\n"
                "order = Order(id=7); session.add(order)\n"
                'bus.record(order, "order.placed", lambda order: order)\n'
                "session.commit()"
            ),
            PayloadError,
            (
                "payload: an Order is not plain JSON data; convert it first, e.g. a dict "
                'of the columns that matter, {"id": value.id, ...}'
            ),
            database="migrated",
        ),
        Case(
            "changes without an event type",
            ('@bus.record_changes(payload=lambda order: {"id": order.id})\nclass Item: ...'),
            ConfigurationError,
            (
                "record_changes() publishes nothing so; name an event type for insert, "
                "update or delete"
            ),
        ),
        Case(
            "a payload that is no function",
            'bus.record_changes(insert="order.placed", payload={"id": 7})',
            ConfigurationError,
            (
                "payload and key of record_changes() are functions of the changed "
                'object, such as lambda order: {"id": order.id}'
            ),
        ),
        Case(
            "changes of an object instead of its class",
            ('bus.record_changes(insert="order.placed", payload=lambda order: {})(Order(id=7))'),
            ConfigurationError,
            "record_changes() decorates a mapped class, not <Order 7>",
        ),
    ],
}
