"""The plugin with the drafters and policies that come with specdec."""

from __future__ import annotations

from collections.abc import Callable

from specdec.hookspecs import hookimpl

# By import path: a file is read, and what it needs is imported, when its name is used.
DRAFTERS = {
    "autoregressive": "specdec.drafters.autoregressive:AutoregressiveDrafter",
    "ngram": "specdec.drafters.ngram:NgramDrafter",
    "eagle2": "specdec.drafters.eagle2:Eagle2Drafter",
    "glide": "specdec.drafters.glide:GlideDrafter",
    "cape": "specdec.drafters.cape:CapeDrafter",
    "lookup": "specdec.drafters.lookup:LookupDrafter",
}
POLICIES = {
    "fixed": "specdec.policies.fixed:FixedPolicy",
    "heuristic": "specdec.policies.heuristic:HeuristicPolicy",
    "svip": "specdec.policies.svip:SVIPPolicy",
    "confidence": "specdec.policies.confidence:ConfidencePolicy",
    "oracle": "specdec.policies.oracle:OraclePolicy",
}


@hookimpl
def specdec_register_drafters(register: Callable[[str, str], None]) -> None:
    for name, path in DRAFTERS.items():
        register(name, path)


@hookimpl
def specdec_register_policies(register: Callable[[str, str], None]) -> None:
    for name, path in POLICIES.items():
        register(name, path)
