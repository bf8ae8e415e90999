"""SmolLM2-135M-Instruct for specdec, by name, from weights that come with a Python package."""

from collections.abc import Callable
from pathlib import Path

from specdec import hookimpl
from specdec_smollm2.target import smollm2_135m

__all__ = ["smollm2_135m", "specdec_register_models"]


@hookimpl
def specdec_register_models(register: Callable[[str, Callable[[], Path]], None]) -> None:
    register("smollm2-135m", smollm2_135m)
