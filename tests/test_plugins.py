"""Plugins: how they are found, what happens to faulty ones, and a real third-party package."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import specdec
from specdec import builtin, config, hookimpl, plugins
from specdec.errors import SpecdecError
from specdec.plugins import Registry

ROOT = Path(__file__).parent.parent

GOOD = """
    from specdec import LengthPolicy, Params, hookimpl

    class {name}(LengthPolicy):
        summary = "a policy of a test"

        def keep_drafting(self, step):
            return step.depth < 2

    @hookimpl
    def specdec_register_policies(register):
        register("{registers}", {name})
"""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry of this test's own, with the built-ins only, that the whole library uses."""
    fresh = Registry()
    fresh.add(builtin, "builtin", "built in")
    monkeypatch.setattr(plugins, "registry", lambda: fresh)
    return fresh


def write_package(site: Path, name: str, code: str, version: str = "1.0") -> None:
    """What `pip install` leaves behind of a package with one module and an entry point."""
    (site / f"{name}.py").write_text(dedent(code))
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[specdec]\n{name} = {name}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that packages can be installed into."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


# --- the built-ins -------------------------------------------------------------------------------


def test_the_built_ins_are_plugins_like_any_other(registry: Registry) -> None:
    assert {"autoregressive", "ngram", "eagle2", "glide", "cape"} <= set(
        registry.entries["drafter"]
    )
    assert {"fixed", "heuristic", "svip", "confidence"} <= set(registry.entries["policy"])
    for kind in ("drafter", "policy"):
        for entry in registry.entries[kind].values():
            cls: Any = entry.load()
            assert entry.origin == "built in"
            # The list of plugins reads the summary from the source, without an import.
            assert entry.summary() == cls.summary != ""


def test_an_unknown_name_gets_the_nearest_one(registry: Registry) -> None:
    with pytest.raises(SpecdecError, match=r"unknown policy 'svpi'. Did you mean 'svip'\?"):
        plugins.make_policy("svpi")
    with pytest.raises(SpecdecError, match=r"unknown drafter 'eagle'.*'eagle2'.*autoregressive"):
        plugins.make_drafter({"name": "eagle"})


def test_parameters_are_checked_before_anything_is_built(registry: Registry) -> None:
    with pytest.raises(SpecdecError, match=r"policy\.treshold: unknown key.*'threshold'"):
        plugins.make_policy({"name": "svip", "treshold": 0.2})
    with pytest.raises(SpecdecError, match=r"drafter\.base\.min_ngram"):
        plugins.make_drafter({"name": "cape", "base": {"name": "ngram", "min_ngram": 0}})
    with pytest.raises(SpecdecError, match=r"drafter\.expand\.widths: unknown key"):
        plugins.make_drafter(
            {"name": "autoregressive", "model": "m", "expand": {"name": "cape", "widths": 2}}
        )


def test_expand_wraps_a_drafter(registry: Registry) -> None:
    chain = {"name": "autoregressive", "model": "owner/small"}
    short: Any = plugins.make_drafter({**chain, "expand": "cape"})
    long: Any = plugins.make_drafter({"name": "cape", "base": chain})
    for drafter in (short, long):
        assert type(drafter).__name__ == "CapeDrafter"
        assert drafter.params.base.params.model == "owner/small"


def test_instances_and_no_drafter_pass_through(registry: Registry) -> None:
    policy = plugins.make_policy("fixed")
    assert plugins.make_policy(policy) is policy
    assert plugins.make_drafter("none") is None
    assert plugins.make_drafter(None) is None


# --- installed packages --------------------------------------------------------------------------


def test_an_installed_plugin_is_found_with_its_origin(registry: Registry, site: Path) -> None:
    write_package(site, "plugin_a", GOOD.format(name="Two", registers="two"), version="2.1")
    registry.add_installed()
    assert registry.find("policy", "two").origin == "plugin_a 2.1"
    assert type(plugins.make_policy("two")).__name__ == "Two"


BROKEN = {
    "raises": ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
    "no syntax": ("def f(:", "SyntaxError"),
    "missing import": ("import not_there_at_all", "No module named 'not_there_at_all'"),
    "leaves": ("raise SystemExit('bye')", "SystemExit: bye"),
    "no hooks": ("x = 1", "no function marked"),
    "misspelt hook": (
        """
        from specdec import hookimpl
        @hookimpl
        def specdec_register_drafter(register): ...
        """,
        "unknown hook 'specdec_register_drafter'",
    ),
    "wrong parameter": (
        """
        from specdec import hookimpl
        @hookimpl
        def specdec_register_drafters(registry): ...
        """,
        "registry",
    ),
    "hook raises": (
        """
        from specdec import hookimpl
        @hookimpl
        def specdec_register_policies(register):
            register("half", "somewhere:Half")
            raise KeyError("late")
        """,
        "KeyError: 'late'",
    ),
    "no policy": (
        """
        from specdec import hookimpl
        @hookimpl
        def specdec_register_policies(register):
            register("number", 3)
        """,
        "must be a subclass of specdec.LengthPolicy",
    ),
    "no name": (
        """
        from specdec import hookimpl
        @hookimpl
        def specdec_register_drafters(register):
            register("none", "somewhere:Half")
        """,
        "'none' cannot be the name of a drafter",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_named_and_skipped(
    case: str, registry: Registry, site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code, reason = BROKEN[case]
    module = f"broken_{case.replace(' ', '_')}"
    write_package(site, module, code)
    write_package(site, f"z_after_{module}", GOOD.format(name="After", registers="after"))
    before = {kind: set(registry.entries[kind]) for kind in ("drafter", "policy")}
    with caplog.at_level(logging.WARNING):
        registry.add_installed()
    assert f"Skipped the plugin {module} 1.0" in caplog.text
    assert reason in caplog.text
    # Nothing of it stays, and the next plugin is there.
    assert set(registry.entries["drafter"]) == before["drafter"]
    assert set(registry.entries["policy"]) == before["policy"] | {"after"}
    # Whoever looks for one of its names learns why it is not there.
    with pytest.raises(SpecdecError, match=f"unknown policy 'half'.*Skipped: {module} 1.0"):
        plugins.make_policy("half")
    # And a configuration that asks for it gets an error, not a warning.
    with pytest.raises(SpecdecError, match=f"the plugin {module} cannot be loaded"):
        config.read({"plugins": [module]})


def test_two_plugins_with_one_name(registry: Registry, site: Path) -> None:
    write_package(site, "first", GOOD.format(name="A", registers="mine"), version="1.0")
    write_package(site, "second", GOOD.format(name="B", registers="mine"), version="0.3")
    with pytest.raises(SpecdecError, match=r"the policy 'mine': first 1\.0 and second 0\.3"):
        registry.add_installed()


def test_a_built_in_cannot_be_replaced(registry: Registry, site: Path) -> None:
    write_package(site, "greedy", GOOD.format(name="A", registers="svip"))
    with pytest.raises(SpecdecError, match=r"the policy 'svip': built in and greedy 1\.0"):
        registry.add_installed()


def test_two_entry_points_with_one_name(registry: Registry, site: Path) -> None:
    write_package(site, "one", GOOD.format(name="A", registers="a"))
    write_package(site, "two", GOOD.format(name="B", registers="b"))
    (site / "two-1.0.dist-info" / "entry_points.txt").write_text("[specdec]\none = two\n")
    with pytest.raises(SpecdecError, match=r"Two plugins are called 'one': one 1\.0 and two 1\.0"):
        registry.add_installed()


# --- a configuration's own plugins ---------------------------------------------------------------


def test_a_file_beside_the_configuration(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(dedent(GOOD.format(name="Mine", registers="mine")))
    file = tmp_path / "config.yaml"
    file.write_text(f"target: {tmp_path}\nplugins: [mine.py]\npolicy: mine\n")
    for _ in range(2):  # the second time it is there already
        assert type(config.read(file).policy).__name__ == "Mine"
    assert registry.find("policy", "mine").origin == str(tmp_path / "mine.py")


def test_a_module_by_name(registry: Registry, site: Path) -> None:
    (site / "just_a_module.py").write_text(dedent(GOOD.format(name="Mod", registers="mod")))
    checked = config.read({"target": str(site), "plugins": ["just_a_module"], "policy": "mod"})
    assert type(checked.policy).__name__ == "Mod"


def test_an_installed_plugin_may_be_listed_too(registry: Registry, site: Path) -> None:
    write_package(site, "listed", GOOD.format(name="L", registers="listed"))
    registry.add_installed()
    config.read({"target": str(site), "plugins": ["listed"], "policy": "listed"})
    assert registry.find("policy", "listed").origin == "listed 1.0"


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ("not_there.py", "there is no plugin file"),
        ("not_there", "No module named 'not_there'. Install its package, or give the path"),
    ],
)
def test_a_listed_plugin_that_is_missing(registry: Registry, plugin: str, message: str) -> None:
    with pytest.raises(SpecdecError, match=message):
        config.read({"plugins": [plugin]})


# --- models --------------------------------------------------------------------------------------


def models(**loaders: Any) -> object:
    class Plugin:
        @hookimpl
        def specdec_register_models(self, register: Any) -> None:
            for name, loader in loaders.items():
                register(name.replace("_", "-"), loader)

    return Plugin()


def test_a_model_is_resolved_to_what_its_loader_returns(registry: Registry, tmp_path: Path) -> None:
    registry.add(models(my_model=lambda: tmp_path, on_the_hub=lambda: "owner/name"), "m", "m 1.0")
    assert plugins.resolve_model("my-model") == str(tmp_path)
    assert plugins.resolve_model("on-the-hub") == "owner/name"
    assert plugins.resolve_model(str(tmp_path)) == str(tmp_path)
    assert plugins.resolve_model("owner/other") == "owner/other"


def test_a_model_that_cannot_be_had(registry: Registry, tmp_path: Path) -> None:
    def fails() -> Path:
        raise OSError("disk full")

    registry.add(models(my_model=fails), "m", "m 1.0")
    with pytest.raises(SpecdecError, match=r"model 'my-model' \(m 1\.0\).*OSError: disk full"):
        plugins.resolve_model("my-model")
    with pytest.raises(SpecdecError, match="there is no folder /not/there"):
        plugins.resolve_model("/not/there")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(SpecdecError, match="is a file; name the folder"):
        plugins.resolve_model(str(tmp_path / "weights.bin"))


# --- observers -----------------------------------------------------------------------------------


def test_an_observer_sees_every_round(registry: Registry, tiny_target_folder: Path) -> None:
    seen = []

    class Observer:
        @hookimpl
        def specdec_round_finished(self, record: Any) -> None:
            seen.append(record)

    registry.add(Observer(), "observer", "test")
    decoder = specdec.load(target=str(tiny_target_folder), drafter="ngram")
    output = decoder.generate(["the cat", "def f(x):"], max_new_tokens=12)
    assert seen == output.rounds
    assert len(seen) > 2
    seen.clear()
    ids = decoder.tokenizer("the cat", return_tensors="pt")["input_ids"]
    decoder.target.model.generate(ids, max_new_tokens=12, custom_generate=decoder)
    assert seen == decoder.last_output.rounds
    assert len(seen) > 2


# --- a real third-party package ------------------------------------------------------------------


@pytest.fixture(scope="module")
def example_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template plugin, built and installed by pip into a folder of its own."""
    folder = tmp_path_factory.mktemp("example-site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    package = str(ROOT / "plugins" / "specdec-example")
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--target", str(folder), package], check=True
    )
    return folder


def run_with(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`specdec ARGUMENTS` in a process of its own that also has the packages of `site`."""
    return subprocess.run(
        [sys.executable, "-m", "specdec", *arguments],
        env=os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_template_plugin_runs_from_yaml(
    example_site: Path, tmp_path: Path, tiny_target_folder: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        dedent(f"""
        target: {tiny_target_folder}
        drafter: {{name: bigram, smoothing: 0.01}}
        policy: {{name: path, threshold: 0.01, max_length: 4}}
        generation: {{max_new_tokens: 24}}
        """)
    )
    done = run_with(example_site, "generate", str(file), "--prompt", "the cat", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    plain = specdec.load(target=str(tiny_target_folder), drafter="none")
    ids = plain.tokenizer.apply_chat_template(
        [{"role": "user", "content": "the cat"}], add_generation_prompt=True
    )["input_ids"]
    expected = plain.generate([ids], max_new_tokens=24)
    assert found["results"][0]["token_ids"] == expected.token_ids[0]
    assert found["stats"]["drafted"] > 0


def test_the_template_plugin_is_listed(example_site: Path) -> None:
    done = run_with(example_site, "plugins")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for words in ("drafter bigram", "policy path"):
        assert any(
            line.split()[:2] == words.split() and "specdec-example 0.1.0" in line for line in lines
        )


def test_a_plugin_adds_a_command_and_a_broken_one_does_not_hurt(site: Path) -> None:
    write_package(
        site,
        "with_command",
        """
        from specdec import hookimpl

        @hookimpl
        def specdec_register_commands(cli):
            @cli.command("hello")
            def hello(name: str):
                print(f"hello {name}")
        """,
    )
    write_package(site, "broken", "raise RuntimeError('no luck')")
    write_package(
        site,
        "bad_command",
        """
        from specdec import hookimpl

        @hookimpl
        def specdec_register_commands(cli):
            cli.no_such_thing()
        """,
    )
    done = run_with(site, "hello", "you")
    assert (done.returncode, done.stdout) == (0, "hello you\n")
    assert "Skipped the plugin broken 1.0: RuntimeError: no luck" in done.stderr
    assert "Skipped the plugin bad_command 1.0: AttributeError" in done.stderr
    listed = run_with(site, "plugins")
    assert "skipped: RuntimeError: no luck" in listed.stdout
