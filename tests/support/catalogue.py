"""What PostgreSQL's catalogue says of a schema, in a form that can be compared."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, func, select, text

_QUERIES = {
    "relations": """
        SELECT relname, relkind::text, relpersistence::text, reloptions
        FROM pg_class WHERE relnamespace = CAST(:schema AS oid)
    """,
    # in the order of the table: it decides how much room a row takes
    "columns": """
        SELECT c.relname, row_number() OVER (PARTITION BY c.oid ORDER BY a.attnum), a.attname,
          format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity::text,
          a.attgenerated::text, a.attstorage::text, a.attcollation::regcollation::text,
          pg_get_expr(d.adbin, d.adrelid)
        FROM pg_attribute a
        JOIN pg_class c ON c.oid = a.attrelid AND c.relkind IN ('r', 'p')
        LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE c.relnamespace = CAST(:schema AS oid) AND a.attnum > 0 AND NOT attisdropped
    """,
    "constraints": """
        SELECT c.relname, o.conname, o.contype::text, o.convalidated, pg_get_constraintdef(o.oid)
        FROM pg_constraint o JOIN pg_class c ON c.oid = o.conrelid
        WHERE o.connamespace = CAST(:schema AS oid)
    """,
    "indexes": """
        SELECT c.relname, pg_get_indexdef(i.indexrelid), i.indisvalid, i.indisprimary
        FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
        WHERE c.relnamespace = CAST(:schema AS oid)
    """,
    "sequences": """
        SELECT c.relname, format_type(s.seqtypid, NULL), s.seqstart, s.seqincrement, s.seqmax,
          s.seqmin, s.seqcache, s.seqcycle,
          EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype IN ('a', 'i'))
        FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid
        WHERE c.relnamespace = CAST(:schema AS oid)
    """,
    "functions": """
        SELECT proname FROM pg_proc WHERE pronamespace = CAST(:schema AS oid)
    """,
    "types": """
        SELECT typname, typtype::text FROM pg_type
        WHERE typnamespace = CAST(:schema AS oid)
    """,
    "triggers": """
        SELECT c.relname, tgname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
        WHERE NOT t.tgisinternal AND c.relnamespace = CAST(:schema AS oid)
    """,
}


def catalogue(connection: Connection, schema: str, prefix: str) -> dict[str, list[tuple[Any, ...]]]:
    """Everything in *schema*, but for Alembic's version table under *prefix*."""
    # names in definitions are qualified unless they are on the search path
    oid = connection.scalar(
        text("SELECT oid FROM pg_namespace WHERE nspname = :schema"), {"schema": schema}
    )
    before = connection.scalar(text("SHOW search_path"))
    connection.execute(text("SET LOCAL search_path TO pg_catalog"))
    found = {
        what: [tuple(row) for row in connection.execute(text(query), {"schema": oid})]
        for what, query in _QUERIES.items()
    }
    connection.execute(select(func.set_config("search_path", before, True)))
    return {
        what: sorted((row for row in rows if not _of_alembic(row, prefix)), key=repr)
        for what, rows in found.items()
    }


def _of_alembic(row: tuple[Any, ...], prefix: str) -> bool:
    return str(row[0]).removeprefix("_").startswith(f"{prefix}alembic_version")
