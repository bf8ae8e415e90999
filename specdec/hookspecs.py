"""The plugin contract: every hook that specdec calls.

A plugin is a module (or any object) with functions of these names, each marked `@hookimpl`. It is
found through an entry point in the group `specdec` of an installed package, or through the
`plugins:` list of a configuration. The built-in drafters and policies come in the same way. A hook
may be left out, and a function may leave out parameters that it does not need.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import typer

    from specdec.drafters.base import Drafter
    from specdec.metrics import RoundRecord
    from specdec.policies.base import LengthPolicy

hookspec = pluggy.HookspecMarker("specdec")
hookimpl = pluggy.HookimplMarker("specdec")


@hookspec
def specdec_register_drafters(register: Callable[[str, type[Drafter] | str], None]) -> None:
    """Offer drafters by name.

    Called once, when the plugin is loaded.

    Args:
        register: `register("my-drafter", MyDrafter)`. The second argument is a subclass of
            `specdec.Drafter`, or `"package.module:MyDrafter"`, which is imported when it is first
            used. A name that another plugin has taken is an error.
    """


@hookspec
def specdec_register_policies(register: Callable[[str, type[LengthPolicy] | str], None]) -> None:
    """Offer length policies by name.

    Called once, when the plugin is loaded.

    Args:
        register: `register("my-policy", MyPolicy)`, as for drafters, with a subclass of
            `specdec.LengthPolicy`.
    """


@hookspec
def specdec_register_models(register: Callable[[str, Callable[[], str | Path]], None]) -> None:
    """Offer models by name: targets, and checkpoints of drafters.

    Called once, when the plugin is loaded.

    Args:
        register: `register("my-model", loader)`. `loader()` is called when the name is used; it
            downloads or converts what it needs and returns a folder or a hub id that
            `from_pretrained` (or the drafter that reads the checkpoint) accepts.
    """


@hookspec
def specdec_round_finished(record: RoundRecord) -> None:
    """Look at a round: logging, tracing, research probes.

    Called after every round of every generation, between two passes of the models: what it takes is
    added to the time of generation (and counted as time outside the models).

    Args:
        record: what was drafted and accepted in each row, and how long it took. Read only.
    """


@hookspec
def specdec_register_commands(cli: typer.Typer) -> None:
    """Add subcommands to `specdec`.

    Called when the command line starts, also for `specdec --help`: import what is heavy inside the
    command.

    Args:
        cli: the application; `@cli.command("my-command")` adds one.
    """
