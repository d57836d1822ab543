"""One line for every error that a user of the command line can meet, and its exit code.

==== ==========================================================================
code meaning
==== ==========================================================================
0    done
1    failed: the database cannot be reached or refuses, its tables do not fit this
     release, the application raises, or the work itself failed
2    used wrongly: an option, variable or argument that is unknown, missing or cannot
     be used as it is, such as a URL, an application or a revision; trying again is
     of no use until it is changed
130  interrupted
==== ==========================================================================

The line goes to the standard error and begins ``relaybus:``. There is no traceback.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import click
from sqlalchemy.exc import SQLAlchemyError

from sqlalchemy_relaybus.engine import describe
from sqlalchemy_relaybus.exc import ConfigurationError, RelayBusError
from sqlalchemy_relaybus.settings import unknown_variables

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class ErrorCommand(click.Command):
    """A command whose errors end the program with one line and one of the codes above."""

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        """Run the command line and exit."""
        extra["standalone_mode"] = False
        _warn_of_variables()
        try:
            result = super().main(*args, **extra)
            code = result if isinstance(result, int) else 0
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = EXIT_USAGE
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx is not None else "relaybus"
            code = _fail(f"{error.format_message()} (see '{command} --help')", EXIT_USAGE)
        except click.ClickException as error:
            code = _fail(error.format_message(), error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            code = _fail("interrupted; nothing more was done", EXIT_INTERRUPTED)
        except ConfigurationError as error:
            code = _fail(describe(error), EXIT_USAGE)
        except (RelayBusError, SQLAlchemyError) as error:
            code = _fail(describe(error), EXIT_FAILURE)
        except BrokenPipeError:
            # whoever read the output has had enough; what is left of it goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = EXIT_FAILURE
        sys.exit(code)


class ErrorGroup(ErrorCommand, click.Group):
    """A group of commands with such errors."""


def _warn_of_variables() -> None:
    """One line for all that nothing reads: a misspelled one would be ignored silently."""
    if unknown := unknown_variables(os.environ):
        names = [
            name if meant is None else f"{name} (do you mean {meant}?)"
            for name, meant in unknown.items()
        ]
        click.echo(f"relaybus: ignoring unknown variables: {', '.join(names)}", err=True)


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    click.echo(f"relaybus: {line}", err=True)
    return code
