"""``relaybus migrate``: make the tables, and bring them from one version to another."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from sqlalchemy import Connection, func, inspect, select

from sqlalchemy_relaybus.cli.options import Database, database_options, json_option, where_options
from sqlalchemy_relaybus.schema import check_schema
from sqlalchemy_relaybus.settings import click_number
from sqlalchemy_relaybus.tables import SCHEMA_VERSION

# Alembic is imported inside the commands: the other groups do without it.

_lock_option = click.option(
    "--lock-timeout",
    type=click_number(False, 0, 86_400),
    metavar="SECONDS",
    default=60,
    show_default=True,
    help="How long to wait for another migration of this database.",
)


@click.group()
def migrate() -> None:
    """Make the tables, and bring them from one version to another."""


@migrate.command()
@click.argument("revision", default="head")
@database_options
@_lock_option
@json_option
def upgrade(database: Database, revision: str, lock_timeout: float, as_json: bool) -> None:
    """Bring the tables up to REVISION, the newest one by default.

    A schema that is not there is created. May be repeated, and run by several at once. Stop the
    workers of an older release first.
    """
    import alembic_relaybus

    steps, report = _steps(as_json)
    with database.connect() as connection:
        alembic_relaybus.upgrade(
            connection, revision, **database.where, lock_timeout=lock_timeout, report=report
        )
        if revision != "head" and not steps and not as_json:
            _console().print(
                f"nothing to do: the tables are at {escape(revision)} or past it already"
            )
        _finish(connection, database, steps, as_json)


@migrate.command()
@click.argument("revision")
@database_options
@_lock_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def downgrade(
    database: Database, revision: str, lock_timeout: float, yes: bool, as_json: bool
) -> None:
    """Take the tables back to REVISION; "base" drops them all with all that is in them.

    Stop the workers first.
    """
    import alembic_relaybus

    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("nobody can be asked here: confirm with --yes")
        click.confirm(f"Take the tables back to {revision}?", abort=True, err=True)
    steps, report = _steps(as_json)
    with database.connect() as connection:
        alembic_relaybus.downgrade(
            connection, revision, **database.where, lock_timeout=lock_timeout, report=report
        )
        _finish(connection, database, steps, as_json)


@migrate.command()
@database_options
@json_option
def current(database: Database, as_json: bool) -> None:
    """Show the revision and the version that the tables are at."""
    with database.connect() as connection:
        _finish(connection, database, [], as_json)


@migrate.command()
@database_options
@json_option
def check(database: Database, as_json: bool) -> None:
    """Fail with a reason unless the tables fit this release."""
    with database.connect() as connection:
        check_schema(connection, database.tables)
    if as_json:
        click.echo(json.dumps({"version": SCHEMA_VERSION}))
    else:
        _console().print(f"[green]schema version {SCHEMA_VERSION}[/], as this release needs it")


@migrate.command()
@click.argument("revision", default="head")
@click.option("--from", "from_", help='Revision to begin at [an empty database]; "0.1" is one too.')
@where_options
def sql(database: Database, revision: str, from_: str | None) -> None:
    """Print the SQL of an upgrade, one script in one transaction, for psql.

    Nothing is connected to.
    """
    import alembic_relaybus

    if from_ == "0.1":
        from_ = "relaybus_0001"
    click.echo(alembic_relaybus.upgrade_sql(revision, from_=from_, **database.where), nl=False)


def _steps(as_json: bool) -> tuple[list[dict[str, str]], Any]:
    """A list of the steps taken, and the function that fills it and shows them."""
    steps: list[dict[str, str]] = []
    console = _console()

    def report(what: str, name: str) -> None:
        if what == "create schema":
            steps.append({"created_schema": name})
        else:
            steps.append({"direction": what, "revision": name})
        if not as_json:
            console.print(f"[bold]{what}[/] {escape(name)}")

    return steps, report


def _finish(
    connection: Connection, database: Database, steps: list[dict[str, str]], as_json: bool
) -> None:
    import alembic_relaybus

    revision = alembic_relaybus.current(connection, **database.where)
    table = database.tables.schema_version
    version = None
    if inspect(connection).has_table(table.name, schema=table.schema):
        version = connection.scalar(select(func.max(table.c.version)))
    if as_json:
        click.echo(json.dumps({"revision": revision, "version": version, "steps": steps}))
    elif revision is None and version is None:
        where = f" in the schema {database.schema!r}" if database.schema is not None else ""
        _console().print(f"the database has no relaybus tables{escape(where)}")
    elif revision is None:
        _console().print(f"made by revisions of the application, schema version {version}")
    else:
        newest = " (the newest)" if revision == alembic_relaybus.head() else ""
        _console().print(f"at [green]{revision}[/]{newest}, schema version {version}")


def _console() -> Console:
    # one line stays one line wherever it goes
    return Console(highlight=False, soft_wrap=True)
