"""``python -m sqlalchemy_relaybus``: the ``relaybus`` command."""

from sqlalchemy_relaybus.cli import main

if __name__ == "__main__":
    main(prog_name="python -m sqlalchemy_relaybus")
