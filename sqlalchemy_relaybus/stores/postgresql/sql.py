"""What the statements of this store are built with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Connection,
    Dialect,
    Float,
    Select,
    String,
    Text,
    Uuid,
    bindparam,
    cast,
    column,
    func,
    literal,
    literal_column,
    select,
)
from sqlalchemy.sql import ClauseElement
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.selectable import CTE, FromClause, LateralFromClause, TableValuedAlias
from sqlalchemy.types import TypeEngine, UserDefinedType

#: What conditions compare with: stable, so an index can be used.
NOW = func.statement_timestamp()
#: What leases and due times are set from: never earlier than NOW.
CLOCK = func.clock_timestamp()
NO_IDS = cast(literal("{}", String), ARRAY(BigInteger))


class Tid(UserDefinedType[str]):
    """A row's physical address."""

    cache_ok = True

    def get_col_spec(self, **kw: Any) -> str:
        return "TID"


def array_literal(values: Iterable[object]) -> str:
    """Numbers, booleans or addresses as PostgreSQL's text form of an array.

    A list would be dumped by the driver as int2[], int4[] or int8[], whichever its values need,
    and each mix is another prepared statement. The text is cast by the server.
    """
    return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"


#: The text, the order of its parameters where they have no names, and the literals in it.
_Compiled: TypeAlias = tuple[str, Sequence[str] | None, dict[str, Any]]


class Prepared:
    """A statement compiled once for each dialect and sent as text.

    Building SQLAlchemy's cache key for statements of this size costs as much as running them.
    """

    __slots__ = ("_compiled", "_statement")

    def __init__(self, statement: ClauseElement) -> None:
        self._statement = statement
        self._compiled: dict[type[Dialect], _Compiled] = {}

    def sql(self, dialect: Dialect) -> str:
        """The text that is sent."""
        return self._compile(dialect)[0]

    def _compile(self, dialect: Dialect) -> _Compiled:
        key = type(dialect)
        try:
            return self._compiled[key]
        except KeyError:
            compiled = self._statement.compile(dialect=dialect)
            literals = {name: v for name, v in compiled.params.items() if v is not None}
            entry = str(compiled), getattr(compiled, "positiontup", None), literals
            self._compiled[key] = entry
            return entry

    def __call__(self, connection: Connection, parameters: dict[str, Any]) -> list[Any]:
        """Run it; the rows that it returns."""
        sql, positions, literals = self._compile(connection.dialect)
        parameters.update(literals)
        given = tuple(parameters[name] for name in positions) if positions else parameters
        return list(connection.exec_driver_sql(sql, given))


def array(name: str, type_: TypeEngine[Any]) -> ColumnElement[Any]:
    """A parameter for an array of *type_*: of texts and UUIDs a list, else an array literal."""
    if isinstance(type_, Text | Uuid):
        return bindparam(name, type_=ARRAY(type_))
    return cast(bindparam(name, type_=String), ARRAY(type_))


def rows(
    alias: str, ordinality: str | None = None, **columns: tuple[str, TypeEngine[Any]]
) -> TableValuedAlias:
    """``unnest`` of parallel array parameters: ``column=(parameter, type)``.

    *ordinality* names a further column that numbers the rows from 1.
    """
    arrays = [array(parameter, type_) for parameter, type_ in columns.values()]
    names = [column(name, type_) for name, (_, type_) in columns.items()]
    unnested = func.unnest(*arrays)
    if ordinality:
        table = unnested.table_valued(*names, with_ordinality=ordinality)
    else:
        table = unnested.table_valued(*names)
    return table.render_derived(name=alias)


def seconds(value: ColumnElement[Any]) -> ColumnElement[Any]:
    """*value* seconds as an interval."""
    return cast(value, Float) * literal_column("interval '1 second'")


def lease_end() -> ColumnElement[Any]:
    """When a lease of ``lease_duration`` seconds ends that is written now."""
    return CLOCK + seconds(bindparam("lease_duration", type_=Float))


def address(table: FromClause) -> ColumnElement[str]:
    """The physical address of *table*'s row."""
    ctid = column("ctid", Tid())
    ctid.table = table
    return ctid.label("address")


def rows_at(table: FromClause, addresses: Select[Any]) -> ColumnElement[bool]:
    """Whether *table*'s row is at one of *addresses*, which this very statement has found.

    How many rows the planner believes the table to have cannot make a bad plan of it. A join
    would be one: a queue that was empty when it was analysed is thought to have one row, and all
    of it is read and compared.
    """
    found: ColumnElement[Any] = func.array(addresses.scalar_subquery())
    here: ColumnElement[bool] = address(table).element == func.any(found)
    return here


def run_of(deliveries: FromClause, named: FromClause) -> LateralFromClause:
    """The row of the very run that *named* (lane, id, claims) names, looked up by the key.

    ``claims`` differs once a failure of that run was recorded.
    """
    return (
        select(address(deliveries))
        .where(
            deliveries.c.lane == named.c.lane,
            deliveries.c.id == named.c.id,
            deliveries.c.claims == named.c.claims,
        )
        .limit(literal_column("1"))
        .lateral("row")
    )


def unlocked(table: FromClause, addresses: Select[Any]) -> CTE:
    """The rows at *addresses* that nobody else has locked, locked for this statement."""
    return (
        select(address(table))
        .where(rows_at(table, addresses))
        .with_for_update(of=table, skip_locked=True)
        .cte("free")
        .prefix_with("MATERIALIZED")
    )
