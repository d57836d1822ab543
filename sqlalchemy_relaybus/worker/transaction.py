"""Running a transactional handler: its writes and its completion commit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from ..bus import Handler
from ..event import Context
from ..exc import LostLeaseError, RelayBusError
from ..stores.base import Delivery, Store
from ..tables import Tables

_SERIALIZATION_FAILURE = "40001"


class TransactionEndedError(RelayBusError):
    """A transactional handler committed or rolled back the transaction it was given."""

    def __init__(self, handler: str) -> None:
        self.handler = handler
        super().__init__(
            f"handler {handler!r} ended the transaction that its delivery completes in; leave "
            "commit and rollback to the worker, and use begin_nested() for a part that may fail"
        )


class Transactions:
    """The transactions that deliveries complete in."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        tables: Tables,
        holder: UUID,
        session_factory: Callable[..., Session] | None,
    ) -> None:
        self._engine = engine
        self._store = store
        self._tables = tables
        self._holder = holder
        self._session_factory = session_factory

    def run(self, handler: Handler, delivery: Delivery, context: Context) -> None:
        """Call *handler* and commit; raises what it raises, having rolled back."""
        if handler.injection.session_kind == "connection":
            with self._engine.connect() as connection, connection.begin() as begun:
                self._invoke(handler, delivery, context, connection)
                if connection.get_transaction() is not begun or not begun.is_active:
                    raise TransactionEndedError(handler.name)
                self._complete(connection, delivery)
            return
        factory = handler.session_factory or self._session_factory
        session = factory() if factory is not None else Session(self._engine)
        with session, session.begin() as transaction:
            self._invoke(handler, delivery, context, session)
            if session.get_transaction() is not transaction or not transaction.is_active:
                raise TransactionEndedError(handler.name)
            session.flush()
            self._complete(
                session.connection(bind_arguments={"clause": self._tables.deliveries}), delivery
            )

    def _invoke(self, handler: Handler, delivery: Delivery, context: Context, session: Any) -> None:
        assert delivery.event is not None
        handler.injection.invoke(handler.function, delivery.event, context, session)

    def _complete(self, connection: Any, delivery: Delivery) -> None:
        # Last in the transaction: the lane is locked against a takeover until the commit.
        try:
            completed = self._store.complete(connection, self._holder, delivery)
        except DBAPIError as error:
            # In REPEATABLE READ a takeover since the transaction began shows as this.
            if getattr(error.orig, "sqlstate", None) == _SERIALIZATION_FAILURE:
                raise LostLeaseError(delivery.lane, delivery.id) from error
            raise
        if not completed:
            raise LostLeaseError(delivery.lane, delivery.id)
