"""The PostgreSQL store: the contract, spoken in this package's statements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast
from uuid import UUID

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from ...event import Event
from ...exc import SchemaMissingError
from ...lanes import lane_of
from ...tables import Tables
from .. import base
from ..base import (
    BlockedKey,
    DeadLetter,
    Delivery,
    Exchange,
    Exchanged,
    LaneState,
    Lease,
    Live,
    Pair,
    Park,
    Parked,
    Place,
    PurgedEvents,
    PurgedRows,
    Ready,
    Suspect,
    Taken,
)
from . import followers, lanes, operations, outcomes, pump, retention
from .listen import can_listen, listen, notify
from .publish import publish
from .sql import Prepared, array_literal

_UNDEFINED_TABLE = "42P01"
_SERIALIZATION_FAILURE = "40001"
#: A lock was waited for too long, or the statement was cancelled.
_HELD_UP = frozenset({"55P03", "57014"})
#: What libpq says of a connection that is in no transaction.
_IDLE = 0
#: Exchanges until a lane's row is tidied again after that was of no use.
_UNTIDIED = 100
#: Followers that an operator's command lets go itself; their lane's holder sees to the others.
_LET_GO = 100
#: Before every row by its age.
_BEFORE_ALL = Place(datetime.min.replace(tzinfo=UTC), 0)
_LAST_ID = UUID(int=2**128 - 1)


class RowHint(NamedTuple):
    """Where a lane's row is: the hint of its :class:`~sqlalchemy_relaybus.stores.base.Lease`."""

    #: the row's physical address, ``"(block,line)"``
    address: str
    #: for how many exchanges the row's dead versions are left alone
    untidied: int = 0


class PostgreSQLStore:
    """See :class:`~sqlalchemy_relaybus.stores.base.Store`."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    # -- publishing ----------------------------------------------------------------------------

    def publish(self, connection: Connection, events: Sequence[base.NewEvent]) -> None:
        try:
            publish(self.tables, connection, events)
        except DBAPIError as error:
            if _sqlstate(error) == _UNDEFINED_TABLE:
                raise SchemaMissingError(self.tables.events.fullname) from error
            raise

    # -- the worker's connection ---------------------------------------------------------------

    def prepare(self, connection: Connection, *, lock_timeout: float, timeout: float) -> None:
        # Generic plans, and no sequential scan: tables that were empty when a plan was made are
        # not empty for ever. Compiling a statement just in time costs more than running it.
        for setting, value in (
            ("jit", "off"),
            ("enable_seqscan", "off"),
            ("enable_bitmapscan", "off"),
            ("enable_hashjoin", "off"),
            ("enable_mergejoin", "off"),
            ("plan_cache_mode", "force_generic_plan"),
            ("lock_timeout", f"{max(1, round(lock_timeout * 1000))}ms"),
            ("statement_timeout", f"{max(1, round(timeout * 1000))}ms"),
        ):
            connection.execute(
                text("SELECT set_config(:setting, :value, false)"),
                {"setting": setting, "value": value},
            )

    def held_up(self, error: DBAPIError) -> bool:
        return _sqlstate(error) in _HELD_UP

    def conflicted(self, error: DBAPIError) -> bool:
        return _sqlstate(error) == _SERIALIZATION_FAILURE

    def in_transaction(self, connection: Connection) -> bool:
        driver: Any = connection.connection.driver_connection
        if hasattr(driver, "is_in_transaction"):  # asyncpg
            return bool(driver.is_in_transaction())
        status = getattr(getattr(driver, "info", None), "transaction_status", None)  # psycopg
        return status is None or int(status) != _IDLE

    # -- wake-ups ------------------------------------------------------------------------------

    def can_listen(self, connection: Connection) -> bool:
        return can_listen(connection)

    def listen(self, connection: Connection, stopped: Callable[[], bool]) -> Iterator[None]:
        return listen(self.tables, connection, stopped)

    def notify(self, connection: Connection) -> None:
        notify(self.tables, connection)

    # -- who is alive --------------------------------------------------------------------------

    def enlist(
        self, connection: Connection, holder: UUID, owner: str, handlers: Sequence[str], ttl: float
    ) -> Live:
        parameters = {"holder": holder, "owner": owner, "handlers": list(handlers), "ttl": ttl}
        others = lanes.enlist(self.tables)(connection, parameters)
        return Live([frozenset(names) for (names,) in others])

    def resign(self, connection: Connection, holder: UUID) -> None:
        lanes.resign(self.tables)(connection, {"holder": holder})

    # -- lanes ---------------------------------------------------------------------------------

    def probe(self, connection: Connection) -> list[Ready]:
        return [Ready(*row) for row in lanes.probe(self.tables)(connection, {})]

    def take(
        self,
        connection: Connection,
        holder: UUID,
        wanted: Sequence[int],
        limit: int,
        lease_duration: float,
    ) -> list[Taken]:
        parameters = {
            "lanes": array_literal(wanted),
            "limit": limit,
            "holder": holder,
            "lease_duration": lease_duration,
        }
        with connection.begin():
            # a locked table must not hold the caller up: it has leases to renew
            connection.execute(
                text("SELECT set_config('lock_timeout', :limit, true)"),
                {"limit": f"{max(1, round(lease_duration * 100))}ms"},
            )
            taken = lanes.take(self.tables)(connection, parameters)
            if not taken:
                return []
            lost = [(lane, id, company) for lane, *_, started, company in taken for id in started]
            if lost:
                lanes.suspect(self.tables)(
                    connection,
                    {
                        "lanes": array_literal(lane for lane, _, _ in lost),
                        "ids": array_literal(id for _, id, _ in lost),
                        "companies": array_literal(company for _, _, company in lost),
                    },
                )
            suspects: dict[int, dict[int, Suspect]] = {lane: {} for lane, *_ in taken}
            for lane, id, crashes, company in lanes.suspects(self.tables)(
                connection, {"lanes": array_literal(suspects)}
            ):
                suspects[lane][id] = Suspect(crashes, company)
            behind: dict[int, set[Pair]] = {lane: set() for lane, *_ in taken}
            for lane, handler, key in followers.behind(self.tables)(
                connection, {"lanes": array_literal(behind)}
            ):
                behind[lane].add(Pair(handler, key))
        return [
            Taken(
                Lease(lane, epoch, version, RowHint(address)), started, suspects[lane], behind[lane]
            )
            for lane, epoch, version, address, started, _ in taken
        ]

    def renew(
        self,
        connection: Connection,
        holder: UUID,
        leases: Sequence[Lease],
        lease_duration: float,
    ) -> dict[int, Lease]:
        by_lane = {lease.lane: lease for lease in leases}
        parameters = {"lease_duration": lease_duration, **_fence(holder, leases)}
        return {
            lane: by_lane[lane]._replace(version=version, hint=RowHint(address))
            for lane, version, address in lanes.renew(self.tables)(connection, parameters)
        }

    def read_lanes(self, connection: Connection, wanted: Sequence[int]) -> dict[int, LaneState]:
        return {
            lane: LaneState(
                Lease(lane, epoch, version, RowHint(address)), holder, started, prefetched
            )
            for lane, epoch, version, address, holder, started, prefetched in lanes.read_lanes(
                self.tables
            )(connection, {"lanes": array_literal(wanted)})
        }

    def relinquish(self, connection: Connection, holder: UUID, leases: Sequence[Lease]) -> set[int]:
        parameters = _fence(holder, leases)
        return {lane for (lane,) in lanes.relinquish(self.tables)(connection, parameters)}

    # -- the pump ------------------------------------------------------------------------------

    def exchange(self, connection: Connection, holder: UUID, request: Exchange) -> Exchanged:
        asked = {lane.lease.lane: lane.lease for lane in request.lanes}
        places = [cast(RowHint, lease.hint) for lease in asked.values()]
        kept = [*request.started, *request.prefetched]
        # the fence is the lane's lease: what ran under an earlier one is none of its business
        epochs = {lane: lease.epoch for lane, lease in asked.items()}
        finished = [d for d in request.finished if epochs.get(d.lane) == d.epoch]
        parameters = {
            "holder": holder,
            "lanes": array_literal(asked),
            "epochs": array_literal(lease.epoch for lease in asked.values()),
            "versions": array_literal(lease.version for lease in asked.values()),
            # an address is "(block,line)", whose comma must be quoted
            "addresses": array_literal(f'"{place.address}"' for place in places),
            "claim": array_literal(lane.claim for lane in request.lanes),
            "write": array_literal(lane.write for lane in request.lanes),
            "tidy": array_literal(not place.untidied for place in places),
            "finished_lanes": array_literal(d.lane for d in finished),
            "finished_ids": array_literal(d.id for d in finished),
            "finished_claims": array_literal(d.claims for d in finished),
            "kept_lanes": array_literal(d.lane for d in kept),
            "kept_ids": array_literal(d.id for d in kept),
            "kept_starts": array_literal(n < len(request.started) for n in range(len(kept))),
            "handlers": list(request.handlers),
            "limit": request.limit,
            "per_lane": request.per_lane,
            "room": request.room,
            "lease_duration": request.lease_duration,
            "company": request.company,
        }
        reply = Exchanged()
        for row in pump.exchange(self.tables, request.careful)(connection, parameters):
            id, lane, starts, claims, attempts, handler, key, event_id, type, payload = row[:10]
            headers, sequence, created_at, tried, fenced, addresses, removed, seen = row[10:]
            if id is None:
                for lane, address in zip(fenced or (), addresses or (), strict=True):
                    reply.leases[lane] = _renewed(asked[lane], address)
                reply.refused = set(tried or ()) - reply.leases.keys()
                reply.deleted = set(removed or ())
                reply.locked = set(seen or ()) - reply.deleted
                continue
            event = None
            if type is not None:
                event = Event(event_id, type, payload, key, headers, sequence, created_at)
            delivery = Delivery(id, lane, asked[lane].epoch, claims, attempts, handler, key, event)
            (reply.startable if starts else reply.prefetched).append(delivery)
        reply.startable.sort(key=_order)
        reply.prefetched.sort(key=_order)
        return reply

    # -- outcomes ------------------------------------------------------------------------------

    def complete(self, connection: Connection, holder: UUID, delivery: Delivery) -> bool:
        parameters = {
            "holder": holder,
            "lane": delivery.lane,
            "epoch": delivery.epoch,
            "id": delivery.id,
            "claims": delivery.claims,
        }
        return bool(outcomes.complete(self.tables)(connection, parameters))

    def park(self, connection: Connection, holder: UUID, parks: Sequence[Park]) -> Parked:
        each = [park.delivery for park in parks]
        parameters = {
            "holder": holder,
            "lanes": array_literal(d.lane for d in each),
            "epochs": array_literal(d.epoch for d in each),
            "ids": array_literal(d.id for d in each),
            "claims": array_literal(d.claims for d in each),
            "charges": array_literal(park.charge for park in parks),
            "delays": array_literal(park.delay for park in parks),
            "blocks": array_literal(park.blocks for park in parks),
            "statuses": [park.status for park in parks],
            "errors": [park.error for park in parks],
        }
        parked: set[int] = set()
        seen: set[int] = set()
        for id, done in outcomes.park(self.tables)(connection, parameters):
            (parked if done else seen).add(id)
        return Parked(parked, seen - parked)

    def blocked_lanes(self, connection: Connection) -> list[int]:
        return [lane for (lane,) in followers.blocked_lanes(self.tables)(connection, {})]

    def hold_back(
        self,
        connection: Connection,
        holder: UUID,
        leases: Sequence[Lease],
        *,
        parking: Sequence[str],
        beyond: int,
        limit: int,
    ) -> set[tuple[int, Pair]]:
        parameters = {
            "holder": holder,
            "lanes": array_literal(lease.lane for lease in leases),
            "epochs": array_literal(lease.epoch for lease in leases),
            "parking": list(parking),
            "beyond": beyond,
            "limit": limit,
        }
        moved = followers.hold_back(self.tables)(connection, parameters)
        return {(lane, Pair(handler, key)) for lane, handler, key in moved}

    def thin_out(
        self,
        connection: Connection,
        holder: UUID,
        leases: Sequence[Lease],
        *,
        hot: Collection[tuple[int, Pair]],
        kept: Sequence[Delivery],
        limit: int,
    ) -> set[tuple[int, Pair]]:
        parameters = {
            "holder": holder,
            "lanes": array_literal(lease.lane for lease in leases),
            "epochs": array_literal(lease.epoch for lease in leases),
            "hot_handlers": [pair.handler for _, pair in hot],
            "hot_keys": [pair.key for _, pair in hot],
            "kept": array_literal(d.id for d in kept),
            "limit": limit,
        }
        moved = followers.thin_out(self.tables)(connection, parameters)
        return {(lane, Pair(handler, key)) for lane, handler, key in moved}

    def let_go(
        self, connection: Connection, pairs: Collection[tuple[int, Pair]] | None, limit: int
    ) -> dict[tuple[int, Pair], int]:
        parameters: dict[str, Any] = {"limit": limit}
        if pairs is not None:
            parameters |= {
                "lanes": array_literal(lane for lane, _ in pairs),
                "handlers": [pair.handler for _, pair in pairs],
                "keys": [pair.key for _, pair in pairs],
            }
        moved = followers.let_go(self.tables, pairs is None)(connection, parameters)
        return {(lane, Pair(handler, key)): count for lane, handler, key, count in moved}

    def absolve(self, connection: Connection, holder: UUID, deliveries: Sequence[Delivery]) -> None:
        parameters = {
            "holder": holder,
            "lanes": array_literal(d.lane for d in deliveries),
            "epochs": array_literal(d.epoch for d in deliveries),
            "ids": array_literal(d.id for d in deliveries),
        }
        outcomes.absolve(self.tables)(connection, parameters)

    def survived(self, connection: Connection, deliveries: Sequence[Delivery]) -> None:
        parameters = {
            "lanes": array_literal(d.lane for d in deliveries),
            "ids": array_literal(d.id for d in deliveries),
        }
        outcomes.survived(self.tables)(connection, parameters)

    def promote(
        self, connection: Connection, holder: UUID, leases: Iterable[Lease], limit: int
    ) -> list[int]:
        leases = list(leases)
        parameters = {
            "holder": holder,
            "lanes": array_literal(lease.lane for lease in leases),
            "epochs": array_literal(lease.epoch for lease in leases),
            "limit": limit,
        }
        moved = outcomes.promote(self.tables)(connection, parameters)
        return [lane for lane, _ in moved]

    def set_aside(
        self,
        connection: Connection,
        holder: UUID,
        leases: Sequence[Lease],
        known: Sequence[str],
        limit: int,
    ) -> int:
        parameters = {
            "holder": holder,
            "lanes": array_literal(lease.lane for lease in leases),
            "epochs": array_literal(lease.epoch for lease in leases),
            "known": list(known),
            "limit": limit,
        }
        return len(outcomes.set_aside(self.tables)(connection, parameters))

    def reclaim(self, connection: Connection, handlers: Sequence[str], limit: int) -> int:
        parameters = {"handlers": list(handlers), "limit": limit}
        return len(outcomes.reclaim(self.tables)(connection, parameters))

    def requeue(self, connection: Connection, ids: Sequence[int]) -> set[int]:
        moved = operations.requeue(self.tables)(connection, {"ids": array_literal(ids)})
        return {id for _, id in moved}

    def dead_letters(
        self, connection: Connection, handler: str | None, limit: int, after: DeadLetter | None
    ) -> list[DeadLetter]:
        parameters = {
            "handler": handler,
            "limit": limit,
            "since": None if after is None else after.since,
            "id": None if after is None else after.id,
        }
        rows = operations.dead_letters(self.tables)(connection, parameters)
        return [DeadLetter(*row) for row in rows]

    def discard(self, connection: Connection, ids: Sequence[int]) -> set[int]:
        gone = operations.discard(self.tables)(connection, {"ids": array_literal(ids)})
        freed = {
            (lane, Pair(handler, key))
            for _, lane, handler, key, blocks in gone
            if blocks and key is not None
        }
        if freed:
            self.let_go(connection, freed, _LET_GO)
        return {id for id, *_ in gone}

    def release(self, connection: Connection, handler: str, key: str) -> int:
        lane = lane_of(key)
        parameters = {"handler": handler, "lane": lane, "key": key}
        released = operations.release(self.tables)(connection, parameters)
        if released:
            self.let_go(connection, {(lane, Pair(handler, key))}, _LET_GO)
        return len(released)

    def blocked_keys(self, connection: Connection, limit: int) -> list[BlockedKey]:
        rows = operations.blocked_keys(self.tables)(connection, {"limit": limit})
        return [BlockedKey(*row) for row in rows]

    # -- retention -----------------------------------------------------------------------------

    def purge_events(
        self, connection: Connection, start: UUID, age: float, limit: int
    ) -> PurgedEvents:
        retention.fit_transaction()(connection, {})
        page = {"start": start, "age": age, "limit": limit}
        [(seen, old, last, locked)] = retention.lock_page(self.tables)(connection, page)
        removed = 0
        if locked:
            [(removed,)] = retention.remove(self.tables)(connection, {"ids": locked})
        whole = seen == limit and last != _LAST_ID
        following = UUID(int=last.int + 1) if whole else None
        return PurgedEvents(removed, len(locked) - removed, old - len(locked), following)

    def purge_dead(
        self, connection: Connection, after: Place | None, age: float, limit: int
    ) -> PurgedRows:
        return _purge(retention.remove_dead(self.tables), connection, after, age, limit)

    def purge_completed(
        self, connection: Connection, after: Place | None, age: float, limit: int
    ) -> PurgedRows:
        return _purge(retention.remove_completed(self.tables), connection, after, age, limit)


def _purge(
    statement: Prepared, connection: Connection, after: Place | None, age: float, limit: int
) -> PurgedRows:
    retention.fit_transaction()(connection, {})
    place = (after or _BEFORE_ALL)._asdict()
    for removed, found, *last in statement(connection, {**place, "age": age, "limit": limit}):
        return PurgedRows(removed, Place(*last) if found == limit else None)
    return PurgedRows(0, None)


def _renewed(lease: Lease, address: str) -> Lease:
    """*lease* after an exchange that left its row at *address*.

    A row that moved to another page although that was tidied has dead versions that somebody's old
    snapshot still needs. Walking over them all to find that out again is then put off.
    """
    old = cast(RowHint, lease.hint)
    moved = address.partition(",")[0] != old.address.partition(",")[0]
    useless = moved and not old.untidied
    place = RowHint(address, _UNTIDIED if useless else max(0, old.untidied - 1))
    return lease._replace(version=lease.version + 1, hint=place)


def _sqlstate(error: DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None)


def _fence(holder: UUID, leases: Sequence[Lease]) -> dict[str, Any]:
    return {
        "holder": holder,
        "lanes": array_literal(lease.lane for lease in leases),
        "epochs": array_literal(lease.epoch for lease in leases),
        "versions": array_literal(lease.version for lease in leases),
    }


def _order(delivery: Delivery) -> tuple[int, int]:
    return delivery.lane, delivery.id
