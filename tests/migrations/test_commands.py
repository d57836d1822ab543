"""``relaybus migrate``, plain ``alembic`` and ``check_schema``: what they say, and how they end."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Engine, inspect, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import alembic_relaybus
from sqlalchemy_relaybus.cli import main
from sqlalchemy_relaybus.exc import SchemaMissingError, SchemaVersionError
from sqlalchemy_relaybus.schema import check_schema
from sqlalchemy_relaybus.tables import tables_for

CHECKOUT = Path(__file__).parents[2]
UNREACHABLE = "postgresql+psycopg://postgres@127.0.0.1:1/x"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "SCHEMA", "PREFIX"):
        monkeypatch.delenv(f"RELAYBUS_{name}", raising=False)


def relaybus(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def alembic(*arguments: str, url: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "RELAYBUS_URL"}
    if url is not None:
        environment["RELAYBUS_URL"] = url
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "alembic", *arguments],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ([], 2, "no database given: use --url or set RELAYBUS_URL"),
        (["--url", "nonsense secret"], 2, "the database URL cannot be read; it has the form"),
        (["--url", "foo"], 2, "the database URL cannot be read"),
        (["--url", "foo://x/y"], 2, "there is no store for 'foo' databases"),
        (["--url", "mysql://x/y"], 2, "this release works with postgresql only"),
        (["--url", "postgresql+psycopg2://x/y"], 2, "use psycopg (3), with a URL such as postgres"),
        (["--url", "postgresql://x:port/y"], 2, "the database URL cannot be read"),
        (["--url", UNREACHABLE], 1, "the database cannot be reached: connection failed"),
        (["--url", "sqlite://"], 2, "there is no store for 'sqlite' databases"),
        (["--url", UNREACHABLE, "--prefix", "p" * 40], 2, "is longer than 32 bytes"),
        (["--url", UNREACHABLE, "--schema", ""], 2, "the schema must not be empty"),
        (["--url", "postgresql+asyncpg://x/y"], 2, "'postgresql+asyncpg' is not supported"),
        (["--nonsense"], 2, "--nonsense"),
        (["--lock-timeout", "soon"], 2, "'soon' is not a number of seconds from 0 to 86400"),
        (["--lock-timeout", "-1"], 2, "'-1' is not a number of seconds from 0 to 86400"),
    ],
)
def test_errors_are_one_line(arguments: list[str], code: int, line: str) -> None:
    result = relaybus("migrate", "upgrade", *arguments)
    assert result.exit_code == code
    assert line in result.stderr
    assert result.stderr.startswith("relaybus: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert "secret" not in result.stderr


@pytest.mark.parametrize("command", ["current", "check", "upgrade"])
def test_another_store_is_refused_before_anything_is_made(command: str, tmp_path: Path) -> None:
    result = relaybus("migrate", command, "--url", f"sqlite:///{tmp_path}/x.db")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "there is no store for 'sqlite' databases; this release works with" in result.stderr
    done = alembic("-x", f"url=sqlite:///{tmp_path}/x.db", "current")
    assert done.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_help_tells_the_variables() -> None:
    words = " ".join(relaybus("migrate", "upgrade", "--help").output.split())
    for name in ("URL", "SCHEMA", "PREFIX"):
        assert f"[env var: RELAYBUS_{name}" in words


def test_a_misspelled_variable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAYBUS_SHEMA", "shop")
    monkeypatch.setenv("RELAYBUS_OF_MINE", "1")
    result = relaybus("migrate", "sql")
    assert result.exit_code == 0
    assert result.stderr == (
        "relaybus: ignoring unknown variables: RELAYBUS_OF_MINE, "
        "RELAYBUS_SHEMA (do you mean RELAYBUS_SCHEMA?)\n"
    )


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield (*path, name)


def test_help_tells_which_commands_take_a_url() -> None:
    words = " ".join(relaybus("--help").output.split())
    assert "take it from --url or RELAYBUS_URL. 'migrate sql' does not connect." in words
    for path in commands(main):
        takes = "--url" in relaybus(*path, "--help").output
        assert takes is (path != ("migrate", "sql")), path


def test_the_command_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sqlalchemy_relaybus", "migrate", "check", "--url", UNREACHABLE],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("relaybus: the database cannot be reached")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_upgrade_says_what_it_did(empty_database_url: str) -> None:
    first = relaybus("migrate", "upgrade", "--url", empty_database_url)
    assert first.exit_code == 0
    assert first.output.splitlines() == [
        "upgrade relaybus_0001",
        "upgrade relaybus_0002",
        "at relaybus_0002 (the newest), schema version 2",
    ]
    again = relaybus("migrate", "upgrade", "--url", empty_database_url, "--json")
    assert json.loads(again.output) == {"revision": "relaybus_0002", "version": 2, "steps": []}
    assert relaybus("migrate", "check", "--url", empty_database_url).exit_code == 0


def test_bare_postgresql_url_means_psycopg(empty_database_url: str) -> None:
    url = empty_database_url.replace("postgresql+psycopg://", "postgresql://")
    assert relaybus("migrate", "upgrade", "--url", url).exit_code == 0


def test_no_tables(empty_database_url: str) -> None:
    assert (
        "no relaybus tables" in relaybus("migrate", "current", "--url", empty_database_url).output
    )
    result = relaybus("migrate", "check", "--url", empty_database_url)
    assert result.exit_code == 1
    assert result.stderr == (
        "relaybus: the database has no table 'relaybus_schema_version'; create the tables with "
        "'relaybus migrate upgrade --url URL'\n"
    )


def test_newer_and_older_tables(engine: Engine, database_url: str) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE relaybus_schema_version SET version = 3"))
        connection.execute(text("UPDATE relaybus_alembic_version SET version_num = 'relaybus_9'"))
    result = relaybus("migrate", "check", "--url", database_url)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "version 3, newer than the version 2" in result.stderr
    for command in (["upgrade"], ["downgrade", "base", "--yes"]):
        result = relaybus("migrate", *command, "--url", database_url)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert "at revision 'relaybus_9', which this release does not know" in result.stderr
    with engine.begin() as connection:
        connection.execute(text("UPDATE relaybus_schema_version SET version = 1"))
    result = relaybus("migrate", "check", "--url", database_url)
    assert "version 1, older than the version 2" in result.stderr


def test_unknown_revision(database_url: str) -> None:
    result = relaybus("migrate", "upgrade", "relaybus_7", "--url", database_url)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "relaybus_7" in result.stderr


def test_downgrade_asks(database_url: str, engine: Engine) -> None:
    result = relaybus("migrate", "downgrade", "base", "--url", database_url)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--yes" in result.stderr
    with engine.connect() as connection:
        check_schema(connection, tables_for())
    assert relaybus("migrate", "downgrade", "base", "--url", database_url, "--yes").exit_code == 0
    assert inspect(engine).get_table_names() == ["relaybus_alembic_version"]


def test_schema_and_prefix(empty_database_url: str, empty_engine: Engine) -> None:
    where = ["--url", empty_database_url, "--schema", "shop", "--prefix", "bus_"]
    assert relaybus("migrate", "upgrade", *where).exit_code == 0
    assert relaybus("migrate", "check", *where).exit_code == 0
    assert "bus_deliveries" in inspect(empty_engine).get_table_names(schema="shop")
    assert inspect(empty_engine).get_table_names() == []


def test_a_schema_is_made_by_an_upgrade_only_and_told(
    empty_database_url: str, empty_engine: Engine
) -> None:
    where = ["--url", empty_database_url, "--schema", "shpo"]
    current = relaybus("migrate", "current", *where)
    assert (current.exit_code, current.output) == (
        0,
        "the database has no relaybus tables in the schema 'shpo'\n",
    )
    down = relaybus("migrate", "downgrade", "base", "--yes", *where)
    assert (down.exit_code, down.stderr) == (1, "relaybus: the database has no schema 'shpo'\n")
    plain = alembic("-x", f"url={empty_database_url}", "-x", "schema=shpo", "current")
    assert plain.returncode != 0
    assert "no schema 'shpo'" in plain.stdout + plain.stderr
    assert not inspect(empty_engine).has_schema("shpo")
    told = relaybus("migrate", "upgrade", *where).output.splitlines()
    assert told[:2] == ["create schema shpo", "upgrade relaybus_0001"]
    assert "create schema" not in relaybus("migrate", "upgrade", *where).output
    where[-1] = "other"
    steps = json.loads(relaybus("migrate", "upgrade", "--json", *where).output)["steps"]
    assert steps[0] == {"created_schema": "other"}


def test_an_upgrade_to_an_older_revision_says_that_it_did_nothing(database_url: str) -> None:
    told = relaybus("migrate", "upgrade", "relaybus_0001", "--url", database_url).output
    assert told.splitlines() == [
        "nothing to do: the tables are at relaybus_0001 or past it already",
        "at relaybus_0002 (the newest), schema version 2",
    ]


def test_an_upgrade_to_an_older_revision_of_an_empty_database(empty_database_url: str) -> None:
    told = relaybus("migrate", "upgrade", "relaybus_0001", "--url", empty_database_url).output
    assert told.splitlines() == ["upgrade relaybus_0001", "at relaybus_0001, schema version 1"]


def test_what_to_do_names_schema_and_prefix(empty_database_url: str) -> None:
    where = ["--schema", "the shop", "--prefix", "bus_"]
    result = relaybus("migrate", "check", "--url", empty_database_url, *where)
    command = "relaybus migrate upgrade --url URL --schema 'the shop' --prefix bus_"
    assert f"create the tables with '{command}'" in result.stderr
    arguments = [empty_database_url if word == "URL" else word for word in shlex.split(command)[1:]]
    arguments.insert(2, "relaybus_0001")
    assert relaybus(*arguments).exit_code == 0
    result = relaybus("migrate", "check", "--url", empty_database_url, *where)
    assert f"run '{command}'" in result.stderr


def test_sql_of_an_upgrade_from_0_1() -> None:
    script = relaybus("migrate", "sql", "--from", "0.1").output
    assert script.startswith("BEGIN;")
    assert script.rstrip().endswith("COMMIT;")
    assert "DROP TABLE" in script
    assert "0001" not in script.split("UPDATE relaybus_alembic_version")[0].replace(
        "relaybus_0001 -> relaybus_0002", ""
    )


def test_check_schema(empty_engine: Engine) -> None:
    tables = tables_for()
    with empty_engine.connect() as connection:
        with pytest.raises(SchemaMissingError) as missing:
            check_schema(connection, tables)
        assert missing.value.table == "relaybus_schema_version"
        # the caller's transaction goes on
        assert connection.scalar(text("SELECT 1")) == 1
    alembic_relaybus.migrate(empty_engine, "relaybus_0001")
    with empty_engine.connect() as connection:
        with pytest.raises(SchemaVersionError) as version:
            check_schema(connection, tables)
        assert (version.value.found, version.value.expected) == (1, 2)
    alembic_relaybus.migrate(empty_engine)
    with empty_engine.begin() as connection:
        check_schema(connection, tables)
        connection.execute(tables.schema_version.delete())
        with pytest.raises(SchemaMissingError):
            check_schema(connection, tables)


def test_plain_alembic_in_the_checkout(empty_database_url: str, empty_engine: Engine) -> None:
    done = alembic("upgrade", "head", url=empty_database_url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "relaybus: upgrade relaybus_0002" in done.stdout
    done = alembic("-x", f"url={empty_database_url}", "current")
    assert done.stdout.strip() == "relaybus_0002 (head)"
    done = alembic(
        *("-x", f"url={empty_database_url}", "-x", "schema=shop", "-x", "prefix=bus_"),
        *("upgrade", "relaybus@head"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "bus_lanes" in inspect(empty_engine).get_table_names(schema="shop")
    assert alembic("upgrade", "head", "--sql").stdout == alembic_relaybus.upgrade_sql()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "no database given: set RELAYBUS_URL or use -x url=URL"),
        (["-x", "url=foo://x/y"], "there is no store for 'foo' databases"),
        (["-x", f"url={UNREACHABLE}"], "the database cannot be reached"),
    ],
)
def test_plain_alembic_errors_are_one_line(arguments: list[str], line: str) -> None:
    done = alembic(*arguments, "upgrade", "head")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert line in said
    assert said.count("\n") == 1


def test_autogenerate_of_the_application_leaves_our_tables_alone(engine: Engine) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    class Base(DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "relaybus_orders"  # begins with the prefix, and is not ours
        id: Mapped[int] = mapped_column(primary_key=True)

    def differences(**options: object) -> list[str]:
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts=options)
            return [difference[0] for difference in compare_metadata(context, Base.metadata)]

    assert "remove_table" in differences()
    assert differences(include_object=alembic_relaybus.include_object) == ["add_table"]
    assert differences(include_name=alembic_relaybus.include_name) == ["add_table"]
    Base.metadata.create_all(engine)
    Base.metadata.remove(Base.metadata.tables["relaybus_orders"])
    assert differences(include_object=alembic_relaybus.include_object) == ["remove_table"]
