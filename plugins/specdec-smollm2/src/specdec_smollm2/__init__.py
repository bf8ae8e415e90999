"""SmolLM2-135M-Instruct for specdec, by name, and the drafters that were trained for it."""

from collections.abc import Callable
from pathlib import Path

from specdec import hookimpl
from specdec_smollm2.target import smollm2_135m
from specdec_smollm2.trained import smollm2_135m_ar, smollm2_135m_eagle2, smollm2_135m_glide

__all__ = [
    "smollm2_135m",
    "smollm2_135m_ar",
    "smollm2_135m_eagle2",
    "smollm2_135m_glide",
    "specdec_register_models",
]


@hookimpl
def specdec_register_models(register: Callable[[str, Callable[[], Path]], None]) -> None:
    register("smollm2-135m", smollm2_135m)
    register("smollm2-135m-ar", smollm2_135m_ar)
    register("smollm2-135m-eagle2", smollm2_135m_eagle2)
    register("smollm2-135m-glide", smollm2_135m_glide)
