"""Plugins: what is registered under which name, where it comes from, and how it is found.

Three sources, in this order: the built-ins, the entry points of installed packages, and what a
configuration lists under `plugins:`. All of them go through the hooks of `specdec.hookspecs`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from specdec import builtin, hookspecs
from specdec.errors import SpecdecError
from specdec.params import Configurable, suggest, validate

if TYPE_CHECKING:
    import typer

    from specdec.drafters.base import Drafter
    from specdec.metrics import RoundRecord
    from specdec.policies.base import LengthPolicy

logger = logging.getLogger("specdec.plugins")

GROUP = "specdec"
KINDS = {
    "drafter": "specdec_register_drafters",
    "policy": "specdec_register_policies",
    "model": "specdec_register_models",
}
NO_DRAFTER = "none"
"""The name that stands for plain decoding; no plugin can take it."""


class PluginClash(SpecdecError):
    """Two plugins want the same name, and nothing says which of them is meant."""


@cache
def registry() -> Registry:
    """What this process knows: the built-ins and all installed plugins, loaded at first use."""
    plugins = Registry()
    plugins.add(builtin, "builtin", "built in")
    plugins.add_installed()
    return plugins


def make_drafter(choice: Any, where: str = "drafter") -> Drafter | None:
    """A drafter from what a person wrote.

    Args:
        choice: a name, `{"name": ..., **parameters}`, or an instance, which is returned as it is.
            The parameter `base` is a choice of a drafter itself, and `expand: NAME` makes this one
            the base of the drafter NAME (`expand: cape`). None and `"none"` give None: plain
            decoding.
        where: the path of the choice in a configuration, for errors.

    Raises:
        SpecdecError: an unknown name, or parameters that the drafter does not accept.
    """
    if choice is None or isinstance(choice, Configurable):
        return choice  # type: ignore[return-value]
    name, parameters = _split(choice, where)
    if name == NO_DRAFTER and not parameters:
        return None
    expand = parameters.pop("expand", None)
    if "base" in parameters:
        parameters["base"] = make_drafter(parameters["base"], f"{where}.base")
    drafter = _make("drafter", name, parameters, where)
    if expand is None:
        return drafter
    wrapper, options = _split(expand, f"{where}.expand")
    return _make("drafter", wrapper, {"base": drafter, **options}, f"{where}.expand")


def make_policy(choice: Any, where: str = "policy", analysis: bool = False) -> LengthPolicy:
    """A length policy from what a person wrote: a name, a mapping with `name`, or an instance.

    Args:
        analysis: whether one for analysis only (`oracle`) is accepted.

    Raises:
        SpecdecError: an unknown name, or parameters that the policy does not accept.
    """
    if isinstance(choice, Configurable):
        return choice  # type: ignore[return-value]
    name, parameters = _split(choice, where)
    policy: LengthPolicy = _make("policy", name, parameters, where)
    if policy.analysis_only and not analysis:
        raise SpecdecError(
            f"{where}.name: '{name}' is for analysis: it has to know the answer before it is "
            "written, so it works in 'specdec bench' only. Choose another policy."
        )
    return policy


def round_observers() -> list[Callable[[RoundRecord], None]]:
    """What to call after every round: nothing, unless a plugin looks at rounds."""
    hook = registry().hook.specdec_round_finished
    return [lambda record: hook(record=record)] if hook.get_hookimpls() else []


def resolve_model(name: str, where: str = "") -> str:
    """What `from_pretrained` takes for a model's name: a folder, or a hub id.

    A registered model is made or fetched first when it is not here yet.

    Raises:
        SpecdecError: the path of a folder that is not there; a registered model that cannot be had.
    """
    entry = registry().entries["model"].get(name)
    return str(entry.call(where)) if entry else locate_model(name, where)


def locate_model(name: str, where: str = "", folder: Path | None = None) -> str:
    """`name`, or the absolute path of the folder it names; nothing is loaded or fetched.

    Args:
        name: a registered name, a folder, or a hub id.
        folder: where a relative path starts, before the current folder.

    Raises:
        SpecdecError: `name` can only be a folder, and there is none.
    """
    prefix = f"{where}: " if where else ""
    if name in registry().entries["model"]:
        return name
    path = Path(name).expanduser()
    places = [(start / path).absolute() for start in (folder or Path(), Path())]
    for place in places:
        if place.is_dir():
            return str(place)
        if place.is_file():
            raise SpecdecError(f"{prefix}{place} is a file; name the folder that it is in.")
    if looks_like_a_path(name):
        looked = " or ".join(dict.fromkeys(map(str, places)))
        raise SpecdecError(f"{prefix}there is no folder {looked}.")
    return name


def looks_like_a_path(name: str) -> bool:
    """Whether `name` can only be a path: a hub id is `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


@dataclass(frozen=True)
class Registration:
    """One registered name.

    Attributes:
        kind: `"drafter"`, `"policy"` or `"model"`.
        name: the name that configurations use.
        value: what the plugin registered: a class, its import path, or a model's loader.
        origin: the plugin it came from, as people know it: a distribution with its version, a file.
    """

    kind: str
    name: str
    value: Any
    origin: str

    def load(self) -> type[Configurable]:
        """The class of a drafter or policy, imported if need be.

        Raises:
            SpecdecError: it cannot be imported, or is not a class of that kind.
        """
        value = self.value
        if isinstance(value, str):
            module, _, attribute = value.partition(":")
            try:
                value = getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError) as error:
                raise SpecdecError(
                    f"The {self.kind} '{self.name}' ({self.origin}) cannot be imported from "
                    f"{self.value}: {error}."
                ) from error
        _check_class(self.kind, self.name, value)
        return value

    def summary(self) -> str:
        """One line on a drafter or policy. Read from the source where importing can wait."""
        if isinstance(self.value, str):
            return _summary_in_source(*self.value.split(":"))
        return getattr(self.value, "summary", "")

    def call(self, where: str = "") -> str | Path:
        """The folder or hub id of a registered model."""
        try:
            return self.value()
        except SpecdecError:
            raise
        except Exception as error:
            prefix = f"{where}: " if where else ""
            raise SpecdecError(
                f"{prefix}the model '{self.name}' ({self.origin}) is not available: "
                f"{_reason(error)}."
            ) from error


class Registry:
    """Names of drafters, policies and models, and the hooks of the plugins they come from.

    Attributes:
        entries: for each kind, the registered names.
        broken: plugins that were skipped, and why.
    """

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Registration]] = {kind: {} for kind in KINDS}
        self.broken: dict[str, str] = {}
        self._origins: dict[str, str] = {}
        self._manager = pluggy.PluginManager(hookspecs.hookspec.project_name)
        self._manager.add_hookspecs(hookspecs)

    @property
    def hook(self) -> Any:
        """pluggy's callers: `registry().hook.specdec_round_finished(record=record)`."""
        return self._manager.hook

    def find(self, kind: str, name: str, where: str = "") -> Registration:
        """The registration of `name`.

        Raises:
            SpecdecError: nothing has that name; with the nearest one, and all that there are.
        """
        entries = self.entries[kind]
        if name in entries:
            return entries[name]
        prefix = f"{where}: " if where else ""
        skipped = "".join(f" Skipped: {plugin} ({why})." for plugin, why in self.broken.items())
        raise SpecdecError(f"{prefix}unknown {kind} '{name}'. {suggest(name, entries)}{skipped}")

    # --- how plugins come in ---------------------------------------------------------------------

    def add(self, plugin: object, name: str, origin: str) -> None:
        """Take in one plugin, or nothing of it.

        Args:
            plugin: a module, or any object, with functions marked `hookimpl`.
            name: unique; a plugin that is already there under this name is an error.
            origin: where it comes from, for people.

        Raises:
            PluginClash: another plugin has the name, or has registered one of its names.
            Exception: whatever the plugin itself raises, and pluggy for hooks that do not exist.
        """
        if name in self._origins:
            raise PluginClash(
                f"Two plugins are called '{name}': {self._origins[name]} and {origin}. "
                "Uninstall one of them."
            )
        new: list[Registration] = []
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
            if not self._manager.get_hookcallers(plugin):
                raise TypeError("it has no function marked `specdec.hookimpl`")
            for kind, hook in KINDS.items():
                self._call_only(plugin, hook, register=self._collector(kind, origin, new))
        except BaseException:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            raise
        self._origins[name] = origin
        for entry in new:
            self.entries[entry.kind][entry.name] = entry

    def add_installed(self) -> None:
        """The plugins of all installed packages; a broken one is named in a warning and skipped."""
        points = importlib.metadata.entry_points(group=GROUP)
        for point in sorted(points, key=lambda point: (_origin(point), point.name)):
            origin = _origin(point)
            try:
                self.add(point.load(), point.name, origin)
            except PluginClash:
                raise
            except (Exception, SystemExit) as error:
                self._skip(origin, error)

    def add_commands(self, cli: typer.Typer) -> None:
        """Let every plugin add its subcommands; one that fails is named and skipped."""
        for name, plugin in self._manager.list_name_plugin():
            try:
                self._call_only(plugin, "specdec_register_commands", cli=cli)
            except Exception as error:
                self._skip(self._origins[name], error)

    def add_listed(self, plugin: str, folder: Path, where: str = "") -> None:
        """A plugin that a configuration asks for; one that is in already stays as it is.

        Args:
            plugin: the name of a module, or the path of a `.py` file.
            folder: where a relative path starts; the current folder comes next.

        Raises:
            SpecdecError: it cannot be found or loaded.
        """
        prefix = f"{where}: " if where else ""
        is_file = plugin.endswith(".py")
        name = str(_existing_file(plugin, folder, prefix)) if is_file else plugin
        if name in self._origins:
            return
        try:
            module = _import_file(Path(name)) if is_file else importlib.import_module(name)
            if not self._manager.is_registered(module):
                self.add(module, name, name)
        except PluginClash:
            raise
        except (Exception, SystemExit) as error:
            hint = ""
            if isinstance(error, ModuleNotFoundError) and error.name == plugin.partition(".")[0]:
                hint = " Install its package, or give the path of a .py file."
            raise SpecdecError(
                f"{prefix}the plugin {plugin} cannot be loaded: {_reason(error)}.{hint}"
            ) from error

    def sources(self) -> list[Path]:
        """Where the code of the plugins lies that are not specdec's own: packages, or single files."""
        found: set[str] = set()
        for plugin in self._manager.get_plugins():
            name = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__
            top = name.partition(".")[0]
            if top == hookspecs.__name__.partition(".")[0]:
                continue
            module = sys.modules[top]
            file = getattr(module, "__file__", None)  # a session at a prompt has none
            found.update(getattr(module, "__path__", [file] if file else []))
        return sorted(map(Path, found))

    def _call_only(self, plugin: object, hook: str, **arguments: Any) -> None:
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        self._manager.subset_hook_caller(hook, remove_plugins=others)(**arguments)

    def _skip(self, origin: str, error: BaseException) -> None:
        self.broken[origin] = _reason(error)
        logger.warning("Skipped the plugin %s: %s", origin, _reason(error))

    def _collector(
        self, kind: str, origin: str, new: list[Registration]
    ) -> Callable[[str, Any], None]:
        """The `register` that a hook is called with; it fills `new`."""

        def register(name: str, value: Any) -> None:
            if not name or name == NO_DRAFTER:
                raise TypeError(f"{name!r} cannot be the name of a {kind}")
            earlier = self.entries[kind].get(name) or next(
                (entry for entry in new if (entry.kind, entry.name) == (kind, name)), None
            )
            if earlier:
                raise PluginClash(
                    f"Two plugins register the {kind} '{name}': {earlier.origin} and {origin}. "
                    "Uninstall one of them, or rename what it registers."
                )
            if kind == "model" and not callable(value):
                raise TypeError(f"the loader of the model '{name}' is not callable ({value!r})")
            if kind != "model" and not isinstance(value, str):
                _check_class(kind, name, value)
            new.append(Registration(kind, name, value, origin))

        return register


def _split(choice: Any, where: str) -> tuple[str, dict[str, Any]]:
    """`"svip"` or `{"name": "svip", "threshold": 0.2}` as a name and its parameters."""
    if isinstance(choice, str):
        return choice, {}
    if not isinstance(choice, Mapping):
        raise SpecdecError(
            f"{where}: expected a name, or a mapping with `name` (found {choice!r})."
        )
    parameters = dict(choice)
    name = parameters.pop("name", None)
    if not isinstance(name, str):
        raise SpecdecError(f"{where}.name: expected a name (found {name!r}).")
    return name, parameters


def _make(kind: str, name: str, parameters: dict[str, Any], where: str) -> Any:
    cls = registry().find(kind, name, f"{where}.name").load()
    validate(cls.Params, parameters, where)
    return cls(**parameters)


def _check_class(kind: str, name: str, value: Any) -> None:
    # Imported here: the two need torch, and a list of plugins does not.
    from specdec.drafters.base import Drafter
    from specdec.policies.base import LengthPolicy

    base = {"drafter": Drafter, "policy": LengthPolicy}[kind]
    if not (isinstance(value, type) and issubclass(value, base)):
        raise SpecdecError(
            f"The {kind} '{name}' must be a subclass of specdec.{base.__name__} (found {value!r})."
        )


def _origin(point: importlib.metadata.EntryPoint) -> str:
    package = point.dist
    return f"{package.name} {package.version}" if package else point.value


def _summary_in_source(module: str, name: str) -> str:
    """The `summary = "..."` in a class's source. Importing all drafters takes seconds."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder, *inner).with_suffix(".py")
        if path.is_file():
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return _text_assigned_to("summary", node.body)
    return ""


def _text_assigned_to(name: str, body: list[ast.stmt]) -> str:
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Constant(value=str(text))):
                if found == name:
                    return text
    return ""


def _existing_file(plugin: str, folder: Path, prefix: str) -> Path:
    path = Path(plugin).expanduser()
    places = [(start / path).resolve() for start in (folder, Path.cwd())]
    for place in places:
        if place.is_file():
            return place
    looked = " or ".join(dict.fromkeys(map(str, places)))
    raise SpecdecError(f"{prefix}there is no plugin file {looked}.")


def _import_file(path: Path) -> Any:
    # A name of its own for each path: two files may be called plugin.py.
    name = f"specdec_plugin_{path.stem}_{abs(hash(path)):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not Python source")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _reason(error: BaseException) -> str:
    """The error in one line."""
    text = " ".join(str(error).split())
    kind = "" if isinstance(error, SpecdecError) else type(error).__name__
    return ": ".join(part for part in (kind, text[:300]) if part).removesuffix(".")
