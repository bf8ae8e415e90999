"""The grid: what a benchmark's YAML says, and the rows that it expands to.

    target: smollm2-135m
    questions: {source: spec-bench, per_category: 3}
    temperature: [0, 1]
    peers: [transformers, assisted, prompt-lookup]
    rows:
      - {drafter: [ngram, {name: eagle2, checkpoint: smollm2-135m-eagle2}], policy: svip}
      - {drafter: ngram, policy: {name: fixed, length: [3, 5]}, temperature: 0}

Every list expands, also one given for a parameter, unless the parameter takes a list itself. What a
row does not say stands above it: `drafter`, `policy`, `temperature` and `batch_size` may be given
for all rows, so the configuration of `specdec generate` is that of a benchmark with one row.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from specdec import config as base
from specdec import plugins
from specdec.bench.peers import PEERS
from specdec.bench.questions import Question, QuestionSettings, fingerprint, load_questions
from specdec.config import Places, TargetConfig
from specdec.errors import SpecdecError
from specdec.generation import GenerationSettings
from specdec.params import Params, suggest, validate

ROW_KEYS = ("name", "drafter", "policy", "temperature", "batch_size")
KEYS = (
    "plugins", "target", "questions", "generation", "seed", "baseline", "peers", "lengths", "rows",
    "drafter", "policy", "temperature", "batch_size",
)  # fmt: skip
PLAIN = "plain"
"""The row of our own loop without a drafter: always there, it says what a target pass costs."""


class Settings(Params):
    """The keys of a benchmark that are its own."""

    seed: int = Field(0, ge=0, description="of the order of the rows, and of sampling")
    baseline: str = Field("transformers", description="the row that all are compared with")
    lengths: list[Annotated[int, Field(ge=1)]] | None = Field(
        None, description="give the speed-up of the first so many tokens of an answer, for each"
    )


@dataclass(frozen=True)
class Row:
    """One point of the grid.

    Attributes:
        method: what decodes; with temperature and batch size it is unique.
        temperature, batch_size: how it decodes.
        drafter, policy: of our own loop; None for a peer.
        peer: the peer's name and parameters; None for our own loop.
        name: unique; it says the temperature and batch size where there are several.
    """

    method: str
    temperature: float
    batch_size: int
    drafter: dict[str, Any] | None = None
    policy: dict[str, Any] | None = None
    peer: dict[str, Any] | None = None
    name: str = ""

    @property
    def setting(self) -> tuple[float, int]:
        """What rows must share to be compared."""
        return self.temperature, self.batch_size

    @property
    def is_oracle(self) -> bool:
        return self.policy is not None and self.policy["name"] == "oracle"


@dataclass
class BenchConfig:
    """A benchmark's configuration, checked and expanded.

    Attributes:
        name: of the file, without its suffix.
        skipped: rows that cannot be measured, and why.
        places: where each key was set.
    """

    name: str
    target: TargetConfig | Any
    questions: list[Question]
    source: str
    generation: GenerationSettings
    settings: Settings
    rows: list[Row]
    skipped: dict[str, str] = field(default_factory=dict)
    places: Places = field(default_factory=Places)

    def record(self) -> dict[str, Any]:
        """All that decides the results, as it stands in the run's `config.yaml`."""
        target = self.target
        record = {
            "name": self.name,
            "target": target.model_dump() if isinstance(target, TargetConfig) else repr(target),
            "questions": {
                "source": self.source,
                "number": len(self.questions),
                "fingerprint": fingerprint(self.questions),
            },
            "generation": self.generation.model_dump(exclude={"temperature"}),
            **self.settings.model_dump(),
            "rows": [asdict(row) for row in self.rows],
            "skipped": self.skipped,
        }
        return json.loads(json.dumps(record, default=repr))

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.record(), sort_keys=True).encode()).hexdigest()[:12]


def read(
    config: str | Path | Mapping[str, Any], changes: Sequence[str] = (), name: str | None = None
) -> BenchConfig:
    """Check a benchmark's configuration without loading a model.

    Args:
        config: a YAML file, or the same as a mapping.
        changes: `"questions.per_category=1"`: a dotted path and a value in YAML.

    Raises:
        SpecdecError: what is wrong, with its place.
    """
    places = Places()
    if isinstance(config, Mapping):
        document, folder = deepcopy(dict(config)), Path()
    else:
        document, folder = base.parse_file(Path(config), places, KEYS), Path(config).parent
        name = name or Path(config).stem
    with places.named():
        if isinstance(document.get("target"), str):
            document["target"] = {"model": document["target"]}
        for change in changes:
            path, value = base.parse_setting(change)
            places.of[tuple(path)] = "--set "
            base.put(document, path, value)
        return _check(document, folder, name or "bench", places)


def _check(document: dict[str, Any], folder: Path, name: str, places: Places) -> BenchConfig:
    for key in document:
        if key not in KEYS:
            raise SpecdecError(f"{key}: unknown key. {suggest(str(key), KEYS)}")
    for plugin in base.list_of_names(document.get("plugins") or []):
        plugins.registry().add_listed(plugin, folder, "plugins")
    target = document.get("target") or base.default_of("target", None)
    questions = _check_questions(document.get("questions"))
    generation = dict(document.get("generation") or {})
    temperature = generation.pop("temperature", None)
    settings = {key: document[key] for key in Settings.model_fields if key in document}
    grid = _Grid(document, folder, temperature)
    config = BenchConfig(
        name=name,
        target=base.check_target(target, folder),
        questions=load_questions(questions, folder),
        source=questions.source,
        generation=validate(GenerationSettings, generation, "generation"),
        settings=_check_settings(settings),
        rows=grid.rows(),
        skipped=grid.skipped,
        places=places,
    )
    _check_baseline(config)
    _check_lengths(config)
    return config


def _check_questions(value: Any) -> QuestionSettings:
    section = {"source": value} if isinstance(value, str) else value or {}
    if not isinstance(section, Mapping):
        raise SpecdecError(
            f"questions: expected a source or a mapping (found {base.shorten(value)})."
        )
    checked: QuestionSettings = validate(QuestionSettings, dict(section), "questions")
    return checked


def _check_settings(values: dict[str, Any]) -> Settings:
    try:
        return Settings(**values)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']} (found {fault['input']!r})."
            for fault in error.errors()
        ]
        raise SpecdecError("\n".join(faults)) from None


def _check_baseline(config: BenchConfig) -> None:
    baseline = config.settings.baseline
    methods = {row.method for row in config.rows}
    if baseline not in methods:
        raise SpecdecError(f"baseline: no row is called '{baseline}'. {suggest(baseline, methods)}")
    measured = {row.setting for row in config.rows if row.method == baseline}
    for row in config.rows:
        if row.setting not in measured:
            raise SpecdecError(
                f"baseline: '{baseline}' has no row at temperature {row.temperature:g} and batch "
                f"size {row.batch_size}, which '{row.method}' has."
            )


def _check_lengths(config: BenchConfig) -> None:
    if config.settings.lengths and any(row.batch_size > 1 for row in config.rows):
        raise SpecdecError(
            "lengths: the first tokens of an answer are timed for one row at a time; leave lengths "
            "out, or set batch_size to 1."
        )


class _Grid:
    """Expands the rows of a document."""

    def __init__(self, document: dict[str, Any], folder: Path, temperature: Any) -> None:
        self.document, self.folder = document, folder
        self.given = {key: key for key in ROW_KEYS if key in document}
        if temperature is not None:
            self.given["temperature"] = "generation.temperature"
            if "temperature" in document:
                raise SpecdecError("generation.temperature: temperature is given too; keep one.")
        self.skipped: dict[str, str] = {}
        self.target = document.get("target") or base.default_of("target", None)
        self.defaults = {
            "drafter": document.get("drafter") or base.default_of("drafter", self.target),
            "policy": document.get("policy") or base.default_of("policy", self.target),
            "temperature": document.get("temperature", 0.0 if temperature is None else temperature),
            "batch_size": document.get("batch_size", 1),
        }

    def rows(self) -> list[Row]:
        """Peers first, then plain decoding, then the grid in its order."""
        own = list(self._own_rows())
        settings = sorted({row.setting for row in own})
        plain = [
            Row(PLAIN, *setting, drafter={"name": plugins.NO_DRAFTER}, policy={"name": "fixed"})
            for setting in settings
        ]
        own = [row for row in own if row.drafter != {"name": plugins.NO_DRAFTER}]
        rows = [*self._peer_rows(own, settings), *plain, *own]
        return _named(_without_doubles(rows))

    def _own_rows(self) -> Iterator[Row]:
        blocks = self.document.get("rows") or [{}]
        if not isinstance(blocks, list):
            raise SpecdecError(f"rows: expected a list of rows (found {base.shorten(blocks)}).")
        self._check_used(blocks)
        for number, block in enumerate(blocks):
            where = f"rows.{number}" if self.document.get("rows") else ""
            yield from self._expand(block, where)

    def _check_used(self, blocks: list[Any]) -> None:
        """Refuse what stands above the rows, or came with --set, and counts for none of them."""
        for key, place in self.given.items():
            if all(isinstance(block, Mapping) and key in block for block in blocks):
                raise SpecdecError(
                    f"{place}: every row gives its own {key}, so what stands above them would count "
                    "for none; change the rows, or leave it out."
                )

    def _complete(self, section: str, value: Any) -> Any:
        if isinstance(value, list):
            return [self._complete(section, each) for each in value]
        return base.completed(section, value, self.target)

    def _expand(self, block: Any, where: str) -> Iterator[Row]:
        if not isinstance(block, Mapping):
            raise SpecdecError(f"{where}: expected a mapping (found {base.shorten(block)}).")
        for key in block:
            if key not in ROW_KEYS:
                raise SpecdecError(f"{where}.{key}: unknown key. {suggest(str(key), ROW_KEYS)}")
        values = {**self.defaults, **block}
        places = {key: f"{where}.{key}" if key in block and where else key for key in values}
        temperatures = _numbers(values["temperature"], float, 0, places["temperature"])
        sizes = _numbers(values["batch_size"], int, 1, places["batch_size"])
        drafters, policies = (
            list(variants(part, self._complete(part, values[part]), places[part]))
            for part in ("drafter", "policy")
        )
        for drafter, policy in itertools.product(drafters, policies):
            drafter = base.locate(drafter, places["drafter"], self.folder)
            plugins.make_drafter(deepcopy(drafter), places["drafter"])
            plugins.make_policy(deepcopy(policy), places["policy"], analysis=True)
            method = _label(block.get("name"), drafter, policy, where)
            for temperature, size in itertools.product(temperatures, sizes):
                yield Row(method, temperature, size, drafter=drafter, policy=policy)

    def _peer_rows(self, own: list[Row], settings: list[tuple[float, int]]) -> Iterator[Row]:
        peers = self.document.get("peers", ["transformers"])
        if not isinstance(peers, list):
            peers = [peers]
        for number, peer in enumerate(peers):
            where = f"peers.{number}"
            choice = {"name": peer} if isinstance(peer, str) else peer
            if not isinstance(choice, Mapping) or not isinstance(choice.get("name"), str):
                raise SpecdecError(f"{where}: expected a name, or a mapping with `name`.")
            choice = dict(choice)
            everywhere = [temperature for temperature, _ in settings]
            given = choice.pop("temperature", everywhere)
            temperatures = _numbers(given, float, 0, f"{where}.temperature")
            chosen = [setting for setting in settings if setting[0] in temperatures]
            if not chosen:
                raise SpecdecError(
                    f"{where}.temperature: the grid has no temperature "
                    f"{', '.join(f'{value:g}' for value in temperatures)} (it has "
                    f"{', '.join(f'{value:g}' for value in dict.fromkeys(everywhere))})."
                )
            for variant in self._peer_variants(choice, where, own):
                yield from self._peer_settings(variant, chosen)

    def _peer_settings(
        self, peer: dict[str, Any], settings: list[tuple[float, int]]
    ) -> Iterator[Row]:
        for temperature, size in settings:
            reason = PEERS[peer["name"]].cannot(size)
            if reason is None:
                yield Row(_peer_label(peer), temperature, size, peer=peer)
            else:
                self.skipped[f"{_peer_label(peer)}, batch {size}"] = reason

    def _peer_variants(
        self, choice: dict[str, Any], where: str, own: list[Row]
    ) -> Iterator[dict[str, Any]]:
        name = choice["name"]
        if name not in PEERS:
            raise SpecdecError(f"{where}: unknown peer '{name}'. {suggest(name, PEERS)}")
        lacking = PEERS[name].lacking()
        if lacking:
            self.skipped[f"{PEERS[name].label}: adaptive confidence threshold"] = lacking
        models: list[Any] = [None]
        if PEERS[name].needs_model and choice.get("model") is None:
            models = _autoregressive_models(own)
            if not models:
                self.skipped[PEERS[name].label] = (
                    "the grid has no autoregressive drafter to assist with"
                )
        for variant in _product(PEERS[name].Params, choice, where):
            for model in models:
                full = variant if model is None else {**variant, "model": model}
                full = base.locate(full, where, self.folder)
                given = {key: value for key, value in full.items() if key != "name"}
                params = validate(PEERS[name].Params, given, where)
                yield {"name": name, **params.model_dump()}


# --- expansion ------------------------------------------------------------------------------------


def variants(kind: str, value: Any, where: str) -> Iterator[dict[str, Any]]:
    """Every choice of a drafter or policy that `value` stands for, written out.

    Raises:
        SpecdecError: an unknown name, or something that is no choice.
    """
    if isinstance(value, list):
        for each in value:
            yield from variants(kind, each, where)
        return
    choice = {"name": value} if isinstance(value, str) else value
    if not isinstance(choice, Mapping) or not isinstance(choice.get("name"), str):
        raise SpecdecError(
            f"{where}: expected a name, or a mapping with `name` (found {base.shorten(value)})."
        )
    if choice["name"] == plugins.NO_DRAFTER:
        yield dict(choice)
        return
    cls = plugins.registry().find(kind, choice["name"], f"{where}.name").load()
    for variant in _product(cls.Params, choice, where):
        inner = [
            [(key, made) for made in variants(kind, variant[key], f"{where}.{key}")]
            for key in ("base", "expand")
            if key in variant
        ]
        for pairs in itertools.product(*inner):
            yield {**variant, **dict(pairs)}


def _product(
    params: type[Params], choice: Mapping[str, Any], where: str
) -> Iterator[dict[str, Any]]:
    """One mapping for each combination of the values in lists."""
    options = []
    for key, value in choice.items():
        several = (
            isinstance(value, list)
            and key not in ("base", "expand")
            and not _takes(params, key, value)
        )
        if several and not value:
            raise SpecdecError(f"{where}.{key}: the list is empty.")
        options.append([(key, each) for each in (value if several else [value])])
    for pairs in itertools.product(*options):
        yield dict(pairs)


def _takes(params: type[Params], key: str, value: list[Any]) -> bool:
    """Whether the parameter takes the list itself. `Any` takes one thing, not a list of them."""
    annotation = params.model_fields[key].annotation if key in params.model_fields else None
    if annotation is None or annotation is Any:
        return False
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError:
        return False
    return True


def _numbers(value: Any, kind: type, least: int, where: str) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    for each in values:
        whole = kind is float or type(each) is int
        if isinstance(each, bool) or not isinstance(each, int | float) or not whole or each < least:
            raise SpecdecError(
                f"{where}: expected numbers from {least} up (found {base.shorten(each)})."
            )
    return [kind(each) for each in values]


def _autoregressive_models(rows: list[Row]) -> list[Any]:
    """The models of all autoregressive drafters, those that another drafter wraps included."""
    models = []
    for row in rows:
        drafter = row.drafter
        while drafter is not None:
            model = drafter.get("model") if drafter["name"] == "autoregressive" else None
            if model is not None and model not in models:
                models.append(model)
            drafter = drafter.get("base")
    return models


# --- names ----------------------------------------------------------------------------------------


def _label(name: Any, drafter: dict[str, Any], policy: dict[str, Any], where: str) -> str:
    pieces = {"drafter": drafter_label(drafter), "policy": policy["name"]}
    if drafter["name"] == plugins.NO_DRAFTER:
        return PLAIN
    template = "{drafter} + {policy}" if name is None else str(name)
    try:
        return template.format(**pieces)
    except (KeyError, IndexError, ValueError):
        raise SpecdecError(
            f"{where}.name: '{template}' may hold {{drafter}} and {{policy}} only."
        ) from None


def drafter_label(drafter: dict[str, Any]) -> str:
    """What people call a drafter: `glide + cape`."""
    label = drafter["name"]
    if "base" in drafter:
        label = f"{drafter_label(drafter['base'])} + {label}"
    if "expand" in drafter:
        label = f"{label} + {drafter['expand']['name']}"
    return label


def drafter_labels(drafters: Sequence[dict[str, Any]]) -> list[str]:
    """A label for each, with what tells those of one kind apart in brackets."""
    labels = [drafter_label(drafter) for drafter in drafters]
    flat = [_flat(drafter) for drafter in drafters]
    return [
        label
        + _difference(
            spec, [other for name, other in zip(labels, flat, strict=True) if name == label]
        )
        for label, spec in zip(labels, flat, strict=True)
    ]


def _peer_label(peer: dict[str, Any]) -> str:
    return PEERS[peer["name"]].label


def _without_doubles(rows: list[Row]) -> list[Row]:
    kept: list[Row] = []
    for row in rows:
        if row not in kept:
            kept.append(row)
    return kept


def _named(rows: list[Row]) -> list[Row]:
    """The rows with names of their own: what tells them apart stands in brackets."""
    by_method: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        spec = _parameters(row)
        if spec not in by_method[row.method]:
            by_method[row.method].append(spec)
    temperatures = {row.temperature for row in rows}
    sizes = {row.batch_size for row in rows}
    named = []
    for row in rows:
        method = row.method + _difference(_parameters(row), by_method[row.method])
        name = method
        name += f", T={row.temperature:g}" if len(temperatures) > 1 else ""
        name += f", B={row.batch_size}" if len(sizes) > 1 else ""
        named.append(Row(**{**asdict(row), "method": method, "name": name}))
    return named


def _difference(spec: dict[str, Any], others: list[dict[str, Any]]) -> str:
    keys = dict.fromkeys(key for other in others for key in other)
    differing = [key for key in keys if len({repr(other.get(key)) for other in others}) > 1]
    shown = [f"{key.rpartition('.')[2]}={_shown(spec[key])}" for key in differing if key in spec]
    return f" ({', '.join(shown)})" if shown else ""


def _flat(parts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """What stands in nested mappings, under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in parts.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _parameters(row: Row) -> dict[str, Any]:
    parts = {"drafter": row.drafter, "policy": row.policy, "peer": row.peer}
    return _flat({name: part or {} for name, part in parts.items()})


def _shown(value: Any) -> str:
    return Path(value).name if isinstance(value, str) else str(value)
