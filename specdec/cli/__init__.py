"""The command line: `specdec COMMAND`. Each module beside this one adds a subcommand.

A module has `register(app)`, and imports what is heavy inside its command: `specdec --help` imports
them all. Modules whose names start with an underscore add none.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import sys
import warnings

import typer

import specdec
from specdec.errors import SpecdecError
from specdec.plugins import registry

FAILED = 2
"""Exit code when something is wrong that the user can put right."""


def main() -> None:
    """Run `specdec` with the arguments of this process."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    _set_up_messages(debug)
    try:
        make_app()(arguments, prog_name="specdec")
    except SpecdecError as error:
        if debug:
            raise
        sys.exit(print_error(error))


def print_error(error: SpecdecError) -> int:
    """Print an error for people; returns the exit code."""
    print(f"specdec: {error}", file=sys.stderr)
    return FAILED


def make_app() -> typer.Typer:
    """The application with all its commands, those of plugins too."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    about = "Lossless speculative decoding: any drafter with any length policy."
    app.callback(help=about)(_options)
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{__name__}.{module.name}").register(app)
    registry().add_commands(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"specdec {specdec.__version__}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the version and exit.",
        callback=_print_version,
        is_eager=True,
    ),
    debug: bool = typer.Option(
        False, "--debug", help="Show the traceback of an error. May stand anywhere."
    ),
) -> None:
    """Only for their help: main() takes --debug out, and --version exits by itself."""


def _set_up_messages(debug: bool) -> None:
    """Messages of specdec go to stderr, without the source line they came from."""
    logger = logging.getLogger("specdec")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("specdec: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    logger.propagate = False
    if not debug:
        warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
