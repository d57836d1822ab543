"""An event that was published is written in its transaction, or that transaction says why not.

Hooks of the application that run behind ours can leave a flush nothing to write, refuse it, or take
the object of an event away. Each test runs in a ``Session`` and inside an ``AsyncSession``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import pytest
from sqlalchemy import Engine, ForeignKey, event, inspect, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    make_transient,
    mapped_column,
    relationship,
)

from sqlalchemy_relaybus import ConfigurationError, RelayBus
from sqlalchemy_relaybus.testing.server import private_postgres
from tests.support.databases import SETTINGS, migrated_template, open_engine
from tests.support.orders import TYPE, make_bus, published


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="new")
    items: Mapped[list[Item]] = relationship(cascade="all, delete-orphan")


class Item(Base):
    __tablename__ = "items"
    id: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[int] = mapped_column(ForeignKey("orders.id"))


@pytest.fixture
def bus() -> RelayBus:
    return make_bus()


#: Runs what is to be done with a session, in one of either kind.
Run = Callable[[Callable[[Session], None]], None]


@pytest.fixture(params=["Session", "AsyncSession"])
def run(request: pytest.FixtureRequest, engine: Engine, database_url: str) -> Run:
    Base.metadata.create_all(engine)

    async def in_async_session(work: Callable[[Session], None]) -> None:
        async_engine = create_async_engine(database_url)
        try:
            async with AsyncSession(async_engine) as session:
                await session.run_sync(work)
        finally:
            await async_engine.dispose()

    def run(work: Callable[[Session], None]) -> None:
        if request.param == "Session":
            with Session(engine) as session:
                work(session)
        else:
            asyncio.run(in_async_session(work))

    return run


def shown(order: Order) -> str:
    return f"order {order.id}"


def described(order: Order) -> str:
    return f"order {order.id} is {order.state}"


def hook(session: Session, name: str, work: Callable[[], object]) -> None:
    """Make *work* a hook of the application, behind ours, for once."""
    event.listen(session, name, lambda *args: work(), once=True)


def expunge(session: Session, order: Order) -> None:
    session.expunge(order)


def expunge_but_events(session: Session, order: Order) -> None:
    for each in session.new:
        if isinstance(each, Order):
            session.expunge(each)


def make_it_transient(session: Session, order: Order) -> None:
    make_transient(order)


TAKEN = pytest.mark.parametrize("take", [expunge, expunge_but_events, make_it_transient])


@TAKEN
def test_a_hook_leaves_the_flush_nothing_else(
    run: Run, engine: Engine, bus: RelayBus, take: Callable[[Session, Order], None]
) -> None:
    def work(session: Session) -> None:
        order = Order()
        session.add(order)
        bus.record(order, TYPE, "recorded")
        bus.publish(session, TYPE, "published")
        hook(session, "before_flush", lambda: take(session, order))
        session.commit()

    run(work)
    assert published(engine, bus.tables) == ["recorded", "published"]


@TAKEN
def test_what_needs_the_key_of_an_object_that_gets_none_is_refused(
    run: Run, engine: Engine, bus: RelayBus, take: Callable[[Session, Order], None]
) -> None:
    """Before the flush, or by a hook in it; and the transaction can go on without that event."""

    def work(session: Session) -> None:
        for hooked in True, False:
            order = Order()
            session.add(order)
            bus.record(order, TYPE, shown)
            bus.publish(session, TYPE, "published")
            if hooked:
                hook(session, "before_flush", partial(take, session, order))
            else:
                take(session, order)
            with pytest.raises(ConfigurationError, match="Order.* has no primary key"):
                session.commit()
            session.rollback()
        bus.publish(session, TYPE, "later")
        session.commit()

    run(work)
    assert published(engine, bus.tables) == ["later"]


# -- hooks that interfere otherwise ----------------------------------------------------------------


def refuse() -> NoReturn:
    raise ValueError("not today")


def test_a_refused_flush_leaves_the_events_to_the_next(
    run: Run, engine: Engine, bus: RelayBus
) -> None:
    """Also where there is nothing else by then, and a savepoint in between is rolled back."""

    def work(session: Session) -> None:
        order = Order()
        session.add(order)
        bus.record(order, TYPE, "recorded")
        bus.publish(session, TYPE, "published")
        hook(session, "before_flush", refuse)
        with pytest.raises(ValueError, match="not today"):
            session.flush()
        session.expunge(order)
        savepoint = session.begin_nested()
        bus.publish(session, TYPE, "gone")
        savepoint.rollback()
        bus.publish(session, TYPE, "later")
        session.commit()

    run(work)
    assert published(engine, bus.tables) == ["recorded", "published", "later"]


def test_a_hook_that_expires_everything(run: Run, engine: Engine, bus: RelayBus) -> None:
    def work(session: Session) -> None:
        order = Order()
        session.add(order)
        bus.record(order, TYPE, shown)
        bus.publish(session, TYPE, "published")
        hook(session, "before_flush", session.expire_all)
        session.commit()

    run(work)
    assert published(engine, bus.tables) == ["order 1", "published"]


def test_a_hook_that_expunges_everything_drops_what_waits(
    run: Run, engine: Engine, bus: RelayBus
) -> None:
    """As ``expunge_all()`` does outside of a flush, and none of it turns up later."""

    def work(session: Session) -> None:
        order = Order()
        session.add(order)
        bus.record(order, TYPE, shown)
        hook(session, "before_flush", session.expunge_all)
        session.flush()
        session.add(Order())
        bus.publish(session, TYPE, "later")
        session.commit()

    run(work)
    assert published(engine, bus.tables) == ["later"]


@pytest.mark.parametrize("name", ["after_flush", "after_flush_postexec"])
def test_a_hook_that_fails_at_the_end_fails_the_transaction(
    run: Run, engine: Engine, bus: RelayBus, name: str
) -> None:
    def work(session: Session) -> None:
        order = Order()
        session.add(order)
        bus.record(order, TYPE, shown)
        hook(session, name, refuse)
        with pytest.raises(ValueError, match="not today"):
            session.commit()
        session.rollback()
        bus.publish(session, TYPE, "later")
        session.commit()
        assert session.scalars(select(Order)).all() == []

    run(work)
    assert published(engine, bus.tables) == ["later"]


def test_hooks_before_the_commit_and_within_the_flush(
    run: Run, engine: Engine, bus: RelayBus
) -> None:
    """What they record waits like anything else, and may be left alone by the next hook."""

    def work(session: Session) -> None:
        first, second = Order(), Order()
        bus.publish(session, TYPE, "published")

        def before_commit() -> None:
            session.add(first)
            bus.record(first, TYPE, "before the commit")

        def before_flush() -> None:
            session.add(second)
            bus.record(second, TYPE, "before the flush")
            session.expunge(first)
            session.expunge(second)

        hook(session, "before_commit", before_commit)
        hook(session, "before_flush", before_flush)
        session.commit()

    run(work)
    assert published(engine, bus.tables) == ["published", "before the commit", "before the flush"]


@pytest.mark.parametrize(
    "name",
    [
        "before_commit",
        "after_commit",
        "after_transaction_create",
        "after_transaction_end",
    ],
)
def test_the_first_to_publish_on_a_session_is_a_hook(run: Run, engine: Engine, name: str) -> None:
    """So the bus gets its own hooks there while SQLAlchemy goes through them."""
    bus = make_bus(wake=True)  # only then it listens to commits

    def work(session: Session) -> None:
        seen: list[str] = []

        def publish_once(*args: object) -> None:
            if not seen:
                bus.publish(session, TYPE, "from the hook")
            seen.append(name)

        event.listen(session, name, publish_once)
        event.listen(session, name, lambda *args: seen.append("the next hook"))
        session.add(Order())
        session.commit()
        assert "the next hook" in seen
        event.remove(session, name, publish_once)
        session.commit()
        bus.detach(session)
        assert not event.contains(session, name, publish_once)

    run(work)
    assert published(engine, bus.tables) == ["from the hook"]


@pytest.mark.parametrize("place", ["ahead", "behind"])
def test_an_object_that_a_hook_adds_at_the_end_has_its_key_in_the_event(
    run: Run, engine: Engine, bus: RelayBus, place: str
) -> None:
    """It gets that in the next flush, and what the hook publishes then keeps its order."""

    def work(session: Session) -> None:
        def after_flush() -> None:
            order = Order()
            session.add(order)
            bus.record(order, TYPE, shown)
            bus.publish(session, TYPE, "published")

        if place == "ahead":
            hook(session, "after_flush", after_flush)
        bus.attach(session)
        if place == "behind":
            hook(session, "after_flush", after_flush)
        session.add(Order())
        session.commit()

    run(work)
    assert published(engine, bus.tables) == ["order 2", "published"]


# -- objects that are flushed otherwise, or not at all ---------------------------------------------


def test_an_orphan_that_the_flush_leaves_out(run: Run, engine: Engine, bus: RelayBus) -> None:
    def work(session: Session) -> None:
        order, item = Order(), Item()
        order.items.append(item)
        session.add(order)
        bus.record(item, TYPE, "constant")
        hook(session, "before_flush", lambda: order.items.remove(item))
        session.commit()
        order.items.append(item := Item())
        bus.record(item, TYPE, lambda item: f"item {item.id}")
        hook(session, "before_flush", lambda: order.items.remove(item))
        with pytest.raises(ConfigurationError, match="Item.* has no primary key"):
            session.commit()

    run(work)
    assert published(engine, bus.tables) == ["constant"]


def test_a_key_that_the_application_gives(run: Run, engine: Engine, bus: RelayBus) -> None:
    """What else the flush gives an object is in its event, too."""

    def work(session: Session) -> None:
        order = Order(id=7)
        session.add(order)
        bus.record(order, TYPE, described)
        session.commit()

    run(work)
    assert published(engine, bus.tables) == ["order 7 is new"]


@pytest.mark.filterwarnings("ignore:The `objects` parameter:DeprecationWarning")
@pytest.mark.parametrize("id", [None, 2])
def test_a_flush_of_chosen_objects(run: Run, engine: Engine, bus: RelayBus, id: int | None) -> None:
    def work(session: Session) -> None:
        recorded, chosen = Order(id=id), Order()
        session.add_all([recorded, chosen])
        bus.record(recorded, TYPE, described)
        bus.publish(session, TYPE, "published")
        session.flush([chosen])
        assert inspect(recorded).pending
        session.commit()

    run(work)
    assert published(engine, bus.tables) == ["order 2 is new", "published"]


def test_an_object_that_needs_no_flush(run: Run, engine: Engine, bus: RelayBus) -> None:
    """Whether it is untouched, expired, expunged or to be deleted."""

    def work(session: Session) -> None:
        order = Order()
        session.add(order)
        session.commit()
        bus.record(order, TYPE, "expired")
        session.commit()
        bus.record(order, TYPE, shown)
        session.refresh(order)  # flushes, too
        bus.record(order, TYPE, "expunged")
        session.expunge(order)
        session.commit()
        session.add(order)
        bus.record(order, TYPE, "deleted")
        session.delete(order)
        session.commit()

    run(work)
    assert published(engine, bus.tables) == ["expired", "order 1", "expunged", "deleted"]


# -- transactions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_a_savepoint_whose_flush_is_left_nothing_else(
    run: Run, engine: Engine, bus: RelayBus, outcome: str
) -> None:
    def work(session: Session) -> None:
        bus.publish(session, TYPE, "before")
        savepoint = session.begin_nested()
        order = Order()
        session.add(order)
        bus.record(order, TYPE, "inside")
        hook(session, "before_flush", lambda: session.expunge(order))
        if outcome == "rollback":
            session.flush()
        getattr(savepoint, outcome)()
        bus.publish(session, TYPE, "behind")
        session.commit()

    run(work)
    inside = ["inside"] if outcome == "commit" else []
    assert published(engine, bus.tables) == ["before", *inside, "behind"]


@pytest.mark.parametrize("end", ["rollback", "close", "invalidate"])
@pytest.mark.parametrize("flush", ["none", "refused", "failed"])
def test_what_waits_ends_with_its_transaction(
    run: Run, engine: Engine, bus: RelayBus, end: str, flush: str
) -> None:
    """And the session is of use again."""

    def work(session: Session) -> None:
        order = Order()
        session.add(order)
        bus.record(order, TYPE, shown)
        if flush != "none":
            hook(session, "before_flush" if flush == "refused" else "after_flush", refuse)
            with pytest.raises(ValueError, match="not today"):
                session.flush()
        getattr(session, end)()
        session.add(Order())
        bus.publish(session, TYPE, "later")
        session.commit()

    run(work)
    assert published(engine, bus.tables) == ["later"]


def test_two_buses(run: Run, engine: Engine, bus: RelayBus) -> None:
    """Each takes its own events out of the flush, whether or not the other's wait."""

    def work(session: Session) -> None:
        other = make_bus()
        for mine, its in (bus, other), (other, bus):
            order = Order()
            session.add(order)
            mine.record(order, TYPE, shown)
            its.publish(session, TYPE, "published")
            session.commit()
            order = Order()
            session.add(order)
            mine.record(order, TYPE, shown)
            its.record(order, TYPE, shown)
            session.commit()
            order = Order()
            session.add(order)
            mine.record(order, TYPE, "left")
            its.record(order, TYPE, "over")
            hook(session, "before_flush", partial(session.expunge, order))
            session.commit()

    run(work)
    each = ["left", "over", "published"]
    assert sorted(published(engine, bus.tables)) == sorted(
        [*each * 2, *["order 1", "order 3"], *["order 2", "order 4"] * 2]
    )


@pytest.mark.parametrize("mode", ["create_savepoint", "control_fully", "rollback_only"])
def test_a_transaction_from_outside(engine: Engine, bus: RelayBus, mode: str) -> None:
    Base.metadata.create_all(engine)
    with engine.connect() as connection, connection.begin() as outer:
        with Session(connection, join_transaction_mode=mode) as session:  # type: ignore[arg-type]
            order = Order()
            session.add(order)
            bus.record(order, TYPE, "recorded")
            hook(session, "before_flush", lambda: session.expunge(order))
            session.commit()
        if outer.is_active:
            outer.commit()
    assert published(engine, bus.tables) == ["recorded"]


def test_a_session_with_a_bind_for_each_table(engine: Engine, bus: RelayBus) -> None:
    """What waits asks for no bind: it has no table."""
    Base.metadata.create_all(engine)
    with Session(binds={Base: engine, bus.tables.events: engine}) as session:
        order = Order()
        session.add(order)
        bus.record(order, TYPE, shown)
        session.commit()
        order = Order()
        session.add(order)
        bus.record(order, TYPE, "recorded")
        hook(session, "before_flush", lambda: session.expunge(order))
        session.commit()
    assert published(engine, bus.tables) == ["order 1", "recorded"]


def test_a_flush_without_a_transaction_of_its_own_is_refused(engine: Engine, bus: RelayBus) -> None:
    Base.metadata.create_all(engine)
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        order = Order()
        session.add(order)
        bus.record(order, TYPE, "recorded")
        hook(session, "before_flush", lambda: session.expunge(order))
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            session.commit()
    assert published(engine, bus.tables) == []


def test_a_transaction_that_is_prepared() -> None:
    bus = make_bus()
    with (
        private_postgres({**SETTINGS, "max_prepared_transactions": "5"}) as server,
        migrated_template(server) as name,
        open_engine(server.url(name)) as engine,
    ):
        Base.metadata.create_all(engine)
        with Session(engine, twophase=True) as session:
            order = Order()
            session.add(order)
            bus.record(order, TYPE, "recorded")
            hook(session, "before_flush", lambda: session.expunge(order))
            session.prepare()
            session.commit()
        assert published(engine, bus.tables) == ["recorded"]


@pytest.mark.parametrize("last", ["before_flush", "after_flush"])
def test_a_bulk_operation_is_no_flush(run: Run, engine: Engine, bus: RelayBus, last: str) -> None:
    """What waits goes on waiting, also behind a flush that was refused or failed."""

    def work(session: Session) -> None:
        session.add(Order(id=7))
        bus.publish(session, TYPE, "gone")
        hook(session, last, refuse)
        with pytest.raises(ValueError, match="not today") as refused:
            session.flush()
        session.rollback()
        order = Order()
        session.add(order)
        bus.record(order, TYPE, shown)
        event.listen(
            session.connection(),
            "before_execute",
            lambda *args: bus.publish(session, TYPE, "published"),
            once=True,
        )
        session.bulk_save_objects([Order(id=8)])
        session.commit()
        del refused  # whose traceback kept that flush alive

    run(work)
    assert published(engine, bus.tables) == ["order 1", "published"]
