"""Our revisions inside those of the application's own Alembic project."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from click.testing import CliRunner
from sqlalchemy import Engine, inspect, text
from sqlalchemy.schema import CreateSchema

import alembic_relaybus
from sqlalchemy_relaybus.cli import main
from sqlalchemy_relaybus.exc import ConfigurationError, SchemaError
from sqlalchemy_relaybus.schema import check_schema
from sqlalchemy_relaybus.tables import DEFAULT_PREFIX, tables_for
from sqlalchemy_relaybus.testing.server import PostgresServer
from tests.support.catalogue import catalogue
from tests.support.databases import open_engine, scratch_database

# as Alembic's template, with a naming convention that would rewrite names
ENV = """
from alembic import context
from sqlalchemy import MetaData

convention = {kind: f"{kind}_%(constraint_name)s" for kind in ("ix", "uq", "ck", "fk")}
convention["pk"] = "pk_%(table_name)s"
metadata = MetaData(naming_convention=convention)
connection = context.config.attributes.get("connection")
if context.is_offline_mode():
    context.configure(
        url="postgresql+psycopg://", target_metadata=metadata, literal_binds=True,
        dialect_opts={"paramstyle": "named"},
    )
else:
    context.configure(connection=connection, target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
"""
REVISION = """
import alembic_relaybus
from alembic import op

revision = {revision!r}
down_revision = {down_revision!r}


def upgrade():
    {upgrade}


def downgrade():
    {downgrade}
"""
WHERE = [
    pytest.param(None, DEFAULT_PREFIX, id="default"),
    pytest.param("the shop", "bus%_", id="schema-and-prefix"),
]


class Project:
    """An Alembic project of an application."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._head: str | None = None
        (directory / "versions").mkdir()
        (directory / "env.py").write_text(ENV)

    def add(self, upgrade: str, downgrade: str = "pass") -> None:
        """Add a revision."""
        revision = f"r{int((self._head or 'r0')[1:]) + 1}"
        source = REVISION.format(
            revision=revision, down_revision=self._head, upgrade=upgrade, downgrade=downgrade
        )
        (self._directory / "versions" / f"{revision}.py").write_text(source)
        self._head = revision

    def config(self, output: io.StringIO | None = None) -> Config:
        config = Config(output_buffer=output)
        config.set_main_option("script_location", str(self._directory))
        return config

    def run(self, engine: Engine, what: Callable[[Config, str], None], revision: str) -> None:
        """Run ``command.upgrade`` or ``command.downgrade``."""
        config = self.config()
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            what(config, revision)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def other_engine(server: PostgresServer) -> Iterator[Engine]:
    with scratch_database(server) as name, open_engine(server.url(name)) as engine:
        yield engine


def add_ours(project: Project, schema: str | None = None, prefix: str = DEFAULT_PREFIX) -> None:
    where = f"schema={schema!r}, prefix={prefix!r}"
    project.add(
        f"alembic_relaybus.upgrade(to='relaybus_0001', {where})",
        f"alembic_relaybus.downgrade(to='base', from_='relaybus_0001', {where})",
    )
    project.add(
        f"alembic_relaybus.upgrade(to='relaybus_0002', from_='relaybus_0001', {where})",
        f"alembic_relaybus.downgrade(to='relaybus_0001', from_='relaybus_0002', {where})",
    )


@pytest.mark.parametrize(("schema", "prefix"), WHERE)
def test_up_and_down(
    project: Project, empty_engine: Engine, other_engine: Engine, schema: str | None, prefix: str
) -> None:
    add_ours(project, schema, prefix)
    project.run(empty_engine, command.upgrade, "head")
    with other_engine.begin() as connection:
        if schema is not None:
            connection.execute(CreateSchema(schema))
        tables_for(schema, prefix).metadata.create_all(connection)
    with empty_engine.connect() as migrated, other_engine.connect() as created:
        check_schema(migrated, tables_for(schema, prefix))
        found = catalogue(migrated, schema or "public", "")  # without the application's table
        assert found == catalogue(created, schema or "public", "")
        assert migrated.scalar(text("SELECT version_num FROM alembic_version")) == "r2"
        assert alembic_relaybus.current(migrated, schema=schema, prefix=prefix) is None
    project.run(empty_engine, command.downgrade, "r1")
    project.run(empty_engine, command.upgrade, "r2")
    with empty_engine.connect() as migrated:
        assert found == catalogue(migrated, schema or "public", "")
    project.run(empty_engine, command.downgrade, "base")
    with empty_engine.connect() as migrated:
        assert not any(catalogue(migrated, schema or "public", "").values())


@pytest.mark.parametrize(("schema", "prefix"), WHERE)
def test_as_a_script(
    project: Project, empty_engine: Engine, other_engine: Engine, schema: str | None, prefix: str
) -> None:
    add_ours(project, schema, prefix)
    output = io.StringIO()
    command.upgrade(project.config(output), "head", sql=True)
    with other_engine.connect() as connection:
        connection.connection.cursor().execute(output.getvalue().encode())
        connection.connection.commit()
    project.run(empty_engine, command.upgrade, "head")
    with empty_engine.connect() as online, other_engine.connect() as offline:
        found = catalogue(online, schema or "public", "")
        assert found == catalogue(offline, schema or "public", "")


def test_the_tables_of_0_1(project: Project, empty_engine: Engine, other_engine: Engine) -> None:
    add_ours(project)
    project.run(empty_engine, command.upgrade, "r1")
    alembic_relaybus.migrate(other_engine, "relaybus_0001")
    with empty_engine.connect() as inside, other_engine.connect() as beside:
        assert catalogue(inside, "public", "") == catalogue(beside, "public", DEFAULT_PREFIX)


def test_all_at_once_and_nothing(project: Project, empty_engine: Engine) -> None:
    project.add("alembic_relaybus.upgrade(to='relaybus_0002')")
    project.add("alembic_relaybus.upgrade(to='relaybus_0002', from_='relaybus_0002')")
    project.run(empty_engine, command.upgrade, "head")
    with empty_engine.connect() as connection:
        check_schema(connection, tables_for())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("upgrade(op.get_bind())", "a migration is running already: inside a revision"),
        ("migrate(op.get_bind().engine)", "a migration is running already"),
        ("upgrade(to='head')", "'head' is another revision in another release"),
        ("upgrade()", "'head' is another revision in another release"),
        ("upgrade(to='relaybus_7')", "relaybus_7"),
        ("upgrade(to='relaybus_0001', from_='relaybus_0002')", "relaybus_0002"),
        ("upgrade(op.get_bind(), from_='relaybus_0001')", "from_ goes without a connection"),
        ("downgrade(to='base')", "from_="),
        ("downgrade(from_='relaybus_0002')", "needs the revision to go to"),
    ],
)
def test_what_is_refused(project: Project, empty_engine: Engine, call: str, words: str) -> None:
    project.add(f"op.execute('CREATE TABLE mine (x int)'); alembic_relaybus.{call}")
    with pytest.raises(ConfigurationError, match=words):
        project.run(empty_engine, command.upgrade, "head")
    assert inspect(empty_engine).get_table_names() == []
    alembic_relaybus.migrate(empty_engine)  # Alembic is in order again


def test_nothing_runs(empty_engine: Engine) -> None:
    with pytest.raises(ConfigurationError, match="no migration runs"):
        alembic_relaybus.upgrade(to="relaybus_0002")


def test_the_two_ways_do_not_meet(project: Project, empty_engine: Engine) -> None:
    project.add("alembic_relaybus.upgrade(to='relaybus_0001')")
    project.run(empty_engine, command.upgrade, "head")
    url = empty_engine.url.render_as_string(hide_password=False)
    shown = CliRunner().invoke(main, ["migrate", "current", "--url", url])
    assert shown.output == "made by revisions of the application, schema version 1\n"
    with pytest.raises(SchemaError, match="revisions of the application made them"):
        alembic_relaybus.migrate(empty_engine)
