"""The hooks of this plugin. Importing it is quick: the classes are given by their import paths."""

from collections.abc import Callable

from specdec import hookimpl


@hookimpl
def specdec_register_drafters(register: Callable[[str, str], None]) -> None:
    register("bigram", "specdec_example.bigram:BigramDrafter")


@hookimpl
def specdec_register_policies(register: Callable[[str, str], None]) -> None:
    register("path", "specdec_example.path:PathPolicy")
