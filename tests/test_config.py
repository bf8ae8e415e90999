"""Configurations: what they mean, and how every fault in one is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import specdec
from specdec import config, plugins
from specdec.config import DEFAULTS, ConfigError
from specdec.errors import SpecdecError
from specdec.generation import GenerationSettings
from specdec.schema import schema

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def write(tmp_path: Path, tiny_target_folder: Path) -> Any:
    """Writes a configuration file; the target is the tiny one unless the text names another."""

    def write(text: str | bytes, target: bool = True) -> Path:
        path = tmp_path / "config.yaml"
        if isinstance(text, bytes):
            path.write_bytes(text)
        else:
            path.write_text(f"{text}\ntarget: {tiny_target_folder}\n" if target else text)
        return path

    return write


# --- what a configuration means ------------------------------------------------------------------


def test_everything_has_a_default(tiny_target_folder: Path) -> None:
    checked = config.read({"target": str(tiny_target_folder)})
    assert (
        type(checked.drafter)
        is plugins.registry().find("drafter", DEFAULTS["drafter"]["name"]).load()
    )
    assert (
        type(checked.policy) is plugins.registry().find("policy", DEFAULTS["policy"]["name"]).load()
    )
    assert checked.generation == GenerationSettings()


def test_a_file_in_full(write: Any, tiny_target_folder: Path) -> None:
    path = write(
        f"""
target: {{model: {tiny_target_folder}, dtype: float32, attn_implementation: eager}}
drafter: {{name: ngram, max_ngram: 2}}
policy: {{name: svip, threshold: 0.5}}
generation: {{max_new_tokens: 7, stop: [x, y]}}
seed: 3
""",
        target=False,
    )
    checked: Any = config.read(path)
    assert checked.target.attn_implementation == "eager"
    assert checked.drafter.params.max_ngram == 2
    assert checked.policy.params.threshold == 0.5
    assert checked.generation.max_new_tokens == 7
    assert checked.generation.stop == ["x", "y"]
    assert checked.seed == 3
    assert checked.title == "ngram + svip"


@pytest.mark.parametrize(
    ("drafter", "title"),
    [
        ("none", "none + svip"),
        ("ngram", "ngram + svip"),
        (
            {"name": "autoregressive", "model": "m", "expand": "cape"},
            "autoregressive + cape + svip",
        ),
        (
            {"name": "cape", "base": {"name": "autoregressive", "model": "m"}},
            "autoregressive + cape + svip",
        ),
    ],
)
def test_the_title_says_what_meets_what(drafter: Any, title: str, tiny_target_folder: Path) -> None:
    assert config.read({"target": str(tiny_target_folder), "drafter": drafter}).title == title


def test_parameters_without_a_name_are_those_of_the_default(tiny_target_folder: Path) -> None:
    checked: Any = config.read({"target": str(tiny_target_folder), "policy": {"threshold": 0.7}})
    assert checked.title.endswith("svip")
    assert checked.policy.params.threshold == 0.7


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers models by name, and no others."""

    def register(*names: str) -> None:
        models = {name: plugins.Registration("model", name, str, "test") for name in names}
        registry = plugins.registry()
        monkeypatch.setattr(registry, "entries", registry.entries | {"model": models})

    return register


def test_the_default_drafter_is_the_one_that_was_trained_for_the_target(
    registered: Any, tiny_target_folder: Path
) -> None:
    registered("smollm2-135m", "smollm2-135m-eagle2")
    checked: Any = config.read()
    assert checked.title == "eagle2 + lookup + svip"
    base = checked.drafter.base.params
    assert (base.checkpoint, base.total_tokens) == ("smollm2-135m-eagle2", 16)
    checked = config.read({"drafter": {"top_k": 3}}, ["drafter.depth=2", "target.dtype=float32"])
    base = checked.drafter.base.params
    assert (checked.title, base.top_k, base.depth) == ("eagle2 + lookup + svip", 3, 2)
    own: Any = config.read({"drafter": {"name": "eagle2", "checkpoint": "smollm2-135m-eagle2"}})
    assert own.drafter.params.top_k == 10, "who names a drafter gets its own defaults"
    assert config.read(settings=["drafter=ngram"]).title == "ngram + svip"
    assert config.read(settings=[f"target={tiny_target_folder}"]).title == "ngram + svip"
    assert config.read(drafter=None).drafter is None


def test_without_a_trained_drafter_the_default_needs_no_model(registered: Any) -> None:
    registered("smollm2-135m")
    assert config.read().title == "ngram + svip"


def test_settings_override_the_file(write: Any) -> None:
    path = write("policy: {name: svip, threshold: 0.5, scale: 0.2}\ndrafter: ngram")
    checked: Any = config.read(
        path, ["policy.threshold=0.1", "generation.stop=[a, b]", "drafter.max_ngram=5", "seed=4"]
    )
    assert (checked.policy.params.threshold, checked.policy.params.scale) == (0.1, 0.2)
    assert checked.generation.stop == ["a", "b"]
    assert checked.drafter.params.max_ngram == 5
    assert checked.seed == 4


@pytest.mark.parametrize(
    "settings", [["policy.name=fixed", "policy.length=3"], ["policy.length=3", "policy.name=fixed"]]
)
def test_another_name_clears_the_old_parameters(settings: list[str], write: Any) -> None:
    checked: Any = config.read(write("policy: {name: svip, threshold: 0.5}"), settings)
    assert checked.title == "ngram + fixed"
    assert checked.policy.params.length == 3


def test_the_same_name_keeps_them(write: Any) -> None:
    path = write("policy: {name: svip, threshold: 0.5}")
    checked: Any = config.read(path, ["policy.name=svip"])
    assert checked.policy.params.threshold == 0.5


def test_keyword_arguments_complete_and_replace(write: Any) -> None:
    path = write("policy: {name: svip, threshold: 0.5}\ngeneration: {max_new_tokens: 9}")
    checked: Any = config.read(path, policy={"scale": 0.3}, generation={"temperature": 1.0})
    assert (checked.policy.params.threshold, checked.policy.params.scale) == (0.5, 0.3)
    assert (checked.generation.max_new_tokens, checked.generation.temperature) == (9, 1.0)
    checked = config.read(path, policy={"name": "fixed", "length": 2}, drafter="none")
    assert checked.policy.params.length == 2
    assert checked.drafter is None


def test_a_mapping_that_is_read_stays_as_it_was(tiny_target_folder: Path) -> None:
    given = {
        "target": {"model": str(tiny_target_folder)},
        "drafter": {"name": "cape", "base": {"name": "autoregressive", "model": "m"}},
        "generation": {"max_new_tokens": 3},
    }
    before = json.dumps(given)
    config.read(given, ["drafter.base.model=n", "target.dtype=float32", "generation.stop=x"])
    assert json.dumps(given) == before


def test_folders_are_found_from_the_file_and_from_here(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "elsewhere" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = write("drafter: {name: autoregressive, model: ./beside}")
    checked: Any = config.read(path)
    assert checked.drafter.params.model == str(tmp_path / "beside")
    checked = config.read(path, ["drafter.model=here"])
    assert checked.drafter.params.model == str(tmp_path / "elsewhere" / "here")


def test_load_gives_a_decoder_with_the_defaults_of_the_file(write: Any) -> None:
    path = write(
        "drafter: ngram\npolicy: fixed\ngeneration: {max_new_tokens: 9, temperature: 5.0}\nseed: 5"
    )
    decoder = specdec.load(path)
    one, two = (decoder.generate("the cat") for _ in range(2))
    assert len(one.token_ids[0]) == 9
    assert one.token_ids == two.token_ids
    assert decoder.generate("the cat", seed=6).token_ids != one.token_ids
    assert len(decoder.generate("the cat", max_new_tokens=3).token_ids[0]) == 3


def test_load_takes_instances(tiny_target_folder: Path) -> None:
    target = specdec.Target.load(str(tiny_target_folder))
    policy = plugins.make_policy("fixed")
    decoder = specdec.load(target=target, policy=policy, drafter="ngram")
    assert decoder.target is target
    assert decoder.policy is policy


# --- faults --------------------------------------------------------------------------------------

FAULTS = {
    "unknown section": ("polcy: svip", "config.yaml:1: polcy: unknown key. Did you mean 'policy'?"),
    "unknown key": (
        "seed: 1\npolicy:\n  name: svip\n  treshold: 0.2",
        "config.yaml:4: policy.treshold: unknown key. Did you mean 'threshold'? Allowed: ",
    ),
    "unknown key in flow style": (
        "policy: {name: svip, treshold: 0.2}",
        "config.yaml:1: policy.treshold: unknown key. Did you mean 'threshold'?",
    ),
    "unknown key of the target": (
        "target: {modl: x}",
        "config.yaml:1: target.modl: unknown key. Did you mean 'model'?",
    ),
    "unknown key of the generation": (
        "generation:\n  max_tokens: 3",
        "config.yaml:2: generation.max_tokens: unknown key. Did you mean 'max_new_tokens'?",
    ),
    "unknown key of the base": (
        "drafter: {name: cape, base: {name: autoregressive, model: m, dtpe: x}}",
        "config.yaml:1: drafter.base.dtpe: unknown key. Did you mean 'dtype'?",
    ),
    "wrong type": (
        "policy: {name: fixed, length: long}",
        "config.yaml:1: policy.length: Input should be a valid integer",
    ),
    "wrong type of a section": (
        "drafter: [ngram]",
        "config.yaml:1: drafter: expected a name, or a mapping with `name` (found ['ngram']).",
    ),
    "wrong type of the target": ("target: 3", "config.yaml:1: target: expected a model's name"),
    "wrong type of the generation": (
        "generation: 12",
        "config.yaml:1: generation: expected a mapping (found 12).",
    ),
    "wrong dtype": ("target: {dtype: float}", "config.yaml:1: target.dtype: Input should be 'auto'"),
    "a list as name": ("policy: {name: [svip]}", "config.yaml:1: policy.name: expected a name"),
    "out of range": (
        "policy:\n  name: svip\n  threshold: -1",
        "config.yaml:3: policy.threshold: Input should be greater than 0 (found -1).",
    ),
    "negative seed": ("seed: -1", "config.yaml:1: seed: expected a whole number from 0 up (found -1)."),
    "unknown drafter": (
        "drafter: egale2",
        "config.yaml:1: drafter.name: unknown drafter 'egale2'. Did you mean 'eagle2'? Allowed: ",
    ),
    "unknown policy": (
        "policy:\n  name: svpi",
        "config.yaml:2: policy.name: unknown policy 'svpi'. Did you mean 'svip'?",
    ),
    "missing parameter": (
        "drafter: autoregressive",
        "config.yaml:1: drafter.model: missing; give it a value.",
    ),
    "missing checkpoint": (
        "drafter:\n  name: eagle2\n  checkpoint: ./no/such/folder",
        "config.yaml:3: drafter.checkpoint: there is no folder ",
    ),
    "missing target": ("target: /no/such/target", "config.yaml:1: target.model: there is no folder "),
    "plugin": ("plugins: [not_there.py]", "config.yaml:1: plugins: there is no plugin file "),
    "plugins as text": ("plugins: mine.py", "config.yaml:1: plugins: expected a list"),
    "a key twice": ("seed: 1\nseed: 2", "config.yaml:2: seed: the key is there twice."),
    "no YAML": ("policy: {name: svip", "config.yaml:1: not a YAML file: "),
    "a tab": ("policy:\n\tname: svip", "config.yaml:2: not a YAML file: "),
    "only text": ("some words", "config.yaml: not a configuration: expected the keys plugins, target"),
    "a list": ("- a\n- b", "config.yaml: not a configuration: expected the keys"),
    "empty": ("", "config.yaml: the file is empty."),
    "only a comment": ("# nothing yet\n", "config.yaml: the file is empty."),
    "numbers as keys": ("1: 2", "config.yaml:1: 1: unknown key."),
    "numbers as keys of a section": (
        "policy: {name: svip, 1: 2}",
        "config.yaml:1: policy.1: Keys should be strings",
    ),
    "binary": (b"\x80\x81\xfe\xff", "config.yaml: not a YAML file: it is not text in UTF-8."),
    "control characters": (b"a: \x01", "config.yaml: not a YAML file: "),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_reported_with_its_place(case: str, write: Any) -> None:
    text, message = FAULTS[case]
    with pytest.raises(ConfigError) as caught:
        config.read(write(text, target=False))
    lines = [line for line in str(caught.value).splitlines() if "smollm2-135m comes" not in line]
    assert len(lines) == 1
    assert lines[0].rpartition("/")[0] != ""  # the file's whole path
    assert message in lines[0]


def test_all_faults_are_reported_at_once(write: Any) -> None:
    text = "drafter: {name: ngram, max: 2}\npolicy: {name: svip, scale: x}\nseed: no"
    with pytest.raises(ConfigError) as caught:
        config.read(write(text))
    places = [
        line.split("config.yaml")[1].split(": ")[:2] for line in str(caught.value).splitlines()
    ]
    assert places == [[":1", "drafter.max"], [":2", "policy.scale"], [":3", "seed"]]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("policy.treshold=1", "--set policy.treshold: unknown key. Did you mean 'threshold'?"),
        ("policy.threshold=none", "--set policy.threshold: Input should be a valid number"),
        ("polcy.threshold=1", "--set polcy: unknown key. Did you mean 'policy'?"),
        ("policy=fixd", "--set policy.name: unknown policy 'fixd'. Did you mean 'fixed'?"),
        ("seed.x=1", "--set seed.x: seed has no keys of its own (it is 1)."),
        ("policy", "--set policy: expected KEY=VALUE"),
        ("policy..x=1", "--set policy..x=1: expected KEY=VALUE"),
        ("generation.stop=[a", "--set generation.stop=[a:1: not a YAML file"),
    ],
)
def test_a_fault_of_a_setting_names_it(setting: str, message: str, write: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        config.read(write("seed: 1"), [setting])
    assert str(caught.value).startswith(message)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: there is no such file"):
        config.read(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        config.read(tmp_path)


def test_the_default_target_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins.registry(), "entries", plugins.registry().entries | {"model": {}})
    with pytest.raises(SpecdecError, match=r"target\.model: .* specdec-smollm2, which is not inst"):
        config.read()


def test_a_target_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match=str(tmp_path)):
        specdec.load(target=str(tmp_path))


# --- the schema ----------------------------------------------------------------------------------


def test_the_schema_has_every_parameter_of_everything() -> None:
    made = schema()
    assert set(made["properties"]) == set(config.KEYS)
    assert set(made["properties"]["generation"]["properties"]) == set(
        GenerationSettings.model_fields
    )
    for kind in ("drafter", "policy"):
        names, *variants = made["$defs"][kind]["oneOf"]
        entries = plugins.registry().entries[kind]
        assert set(names["enum"]) - {"none"} == set(entries)
        for variant in variants:
            name = variant["properties"]["name"]["const"]
            parameters = set(variant["properties"]) - {"name", "expand"}
            cls: Any = entries[name].load()
            assert parameters == set(cls.Params.model_fields)
            assert variant["additionalProperties"] is False
        assert len(variants) == len(entries)


def test_every_reference_in_the_schema_leads_somewhere() -> None:
    made = schema()

    def references(part: Any) -> set[str]:
        if isinstance(part, list):
            return set().union(*map(references, part))
        if not isinstance(part, dict):
            return set()
        own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
        return own.union(*map(references, part.values()))

    assert references(made) <= {f"#/$defs/{name}" for name in made["$defs"]}
