"""The ``relaybus`` command. One module a command group; exit codes are in :mod:`.errors`."""

from __future__ import annotations

import click

from sqlalchemy_relaybus.cli.errors import ErrorGroup
from sqlalchemy_relaybus.cli.migrate import migrate


@click.group(
    name="relaybus",
    cls=ErrorGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(
    package_name="sqlalchemy-relaybus", prog_name="relaybus", message="%(prog)s %(version)s"
)
def main() -> None:
    """Work on the database of a relaybus.

    Commands that connect to it take it from --url or RELAYBUS_URL. 'migrate sql' does not connect.

    Exit codes: 0 done, 1 failed, 2 used wrongly (an option, a variable, a URL or a revision that
    cannot be used), 130 interrupted.
    """


main.add_command(migrate)
