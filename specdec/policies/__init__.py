"""Length policies: how many tokens to draft. One file each."""

from specdec.policies.base import LengthPolicy
from specdec.policies.confidence import ConfidencePolicy
from specdec.policies.fixed import FixedPolicy
from specdec.policies.heuristic import HeuristicPolicy
from specdec.policies.oracle import OraclePolicy
from specdec.policies.svip import SVIPPolicy

__all__ = [
    "ConfidencePolicy",
    "FixedPolicy",
    "HeuristicPolicy",
    "LengthPolicy",
    "OraclePolicy",
    "SVIPPolicy",
]
