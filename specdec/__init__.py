"""Lossless speculative decoding for transformers models: any drafter with any length policy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from specdec.errors import SpecdecError
from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.config import load
    from specdec.decoder import GenerationOutput, SpeculativeDecoder
    from specdec.draft import DraftStep, DraftTree, RoundOutcome
    from specdec.drafters.base import Drafter
    from specdec.params import Params
    from specdec.policies.base import LengthPolicy
    from specdec.target import Target

__version__ = "0.1.0"

__all__ = [
    "DraftStep",
    "DraftTree",
    "Drafter",
    "GenerationOutput",
    "LengthPolicy",
    "Params",
    "RoundOutcome",
    "SpecdecError",
    "SpeculativeDecoder",
    "Target",
    "__version__",
    "hookimpl",
    "load",
]

# Imported at first use (PEP 562): `specdec --help`, and a plugin that needs only `hookimpl`, do not
# wait for torch.
_PLACES = {
    "DraftStep": "specdec.draft",
    "DraftTree": "specdec.draft",
    "Drafter": "specdec.drafters.base",
    "GenerationOutput": "specdec.decoder",
    "LengthPolicy": "specdec.policies.base",
    "Params": "specdec.params",
    "RoundOutcome": "specdec.draft",
    "SpeculativeDecoder": "specdec.decoder",
    "Target": "specdec.target",
    "load": "specdec.config",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'specdec' has no attribute '{name}'")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
