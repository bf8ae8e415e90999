"""The command line: what goes to stdout and stderr, and that the text is the target's own."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specdec
from specdec import cli, plugins
from specdec.check import TIE, check_greedy, check_sampling, exact_law
from specdec.cli.chat import Conversation
from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.errors import SpecdecError
from specdec.verification import Verdict
from tests.tiny import noisy

STATS = {
    "new_tokens", "rounds", "drafted", "accepted", "tau", "alpha", "alpha_by_position",
    "mean_draft_length", "draft_s", "verify_s", "other_s", "wall_s", "tokens_per_s",
}  # fmt: skip


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_target_folder: Path
) -> Any:
    """Runs `specdec ARGUMENTS` on the tiny target; gives the exit code, stdout and stderr."""

    def run(*arguments: str, stdin: str = "", target: bool = True) -> tuple[int, str, str]:
        tiny = ["--set", f"target={tiny_target_folder}"] if target else []
        monkeypatch.setattr(sys, "argv", ["specdec", *arguments, *tiny])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def model(tiny_target_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_target_folder).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_target_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_target_folder)


def by_transformers(model: Any, tokenizer: Any, prompt: str, new: int, chat: bool) -> list[int]:
    """The new tokens of transformers' greedy generate."""
    text = f"user: {prompt}\nassistant: " if chat else prompt
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    written = model.generate(ids, do_sample=False, max_new_tokens=new, pad_token_id=0)
    return written[0, ids.shape[1] :].tolist()


def own_drafter(folder: Path) -> list[str]:
    """Options for a drafter that is the target itself: every draft is accepted."""
    return ["--set", "drafter.name=autoregressive", "--set", f"drafter.model={folder}"]


# --- start ---------------------------------------------------------------------------------------


def test_help_lists_the_commands_without_importing_torch() -> None:
    code = (
        "import sys; from specdec.cli import make_app; app = make_app()\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print('HEAVY', {'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY set()"
    for command in ("generate", "chat", "check", "demo", "plugins", "schema"):
        assert re.search(rf"\b{command}\b", done.stdout)


def test_the_list_of_plugins_does_not_import_torch() -> None:
    code = (
        "import sys; sys.argv = ['specdec', 'plugins']; from specdec.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('HEAVY', {'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY set()"


def test_version(run: Any) -> None:
    assert run("--version", target=False) == (0, f"specdec {specdec.__version__}\n", "")


def test_public_names_are_there() -> None:
    for name in specdec.__all__:
        assert getattr(specdec, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = specdec.nothing_like_it


# --- generate ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [True, False])
def test_text_goes_to_stdout_and_everything_else_to_stderr(
    chat: bool, run: Any, model: Any, tokenizer: Any
) -> None:
    code, out, err = run(
        "generate", "--prompt", "the cat sat on", "--chat" if chat else "--no-chat",
        "--set", "generation.max_new_tokens=20",
    )  # fmt: skip
    expected = by_transformers(model, tokenizer, "the cat sat on", 20, chat)
    assert code == 0
    assert out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert re.search(r"\d+ tokens in [\d.]+ s \([\d.]+ tokens/s\)", err)


def test_json_is_one_object_with_everything(run: Any, model: Any, tokenizer: Any) -> None:
    prompts = ["the cat", "def f(x):", "hello there"]
    arguments = [part for prompt in prompts for part in ("--prompt", prompt)]
    code, out, _ = run("generate", *arguments, "--json", "--set", "generation.max_new_tokens=30")
    assert code == 0
    found = json.loads(out)
    assert set(found) == {"results", "stats"}
    assert set(found["stats"]) >= STATS
    for prompt, result in zip(prompts, found["results"], strict=True):
        expected = by_transformers(model, tokenizer, prompt, 30, chat=True)
        assert list(result) == ["prompt", "text", "token_ids", "finish_reason"]
        assert result["prompt"] == prompt
        assert result["token_ids"] == expected
        assert result["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert result["finish_reason"] == ("eos" if expected[-1] == 2 else "length")
    reasons = {result["finish_reason"] for result in found["results"]}
    assert reasons == {"eos", "length"}
    assert found["stats"]["new_tokens"] == sum(len(r["token_ids"]) for r in found["results"])


def test_several_prompts_are_a_batch(run: Any, model: Any, tokenizer: Any) -> None:
    prompts = ["the cat", "def f(x):"]
    code, out, err = run(
        "generate", "--prompt", prompts[0], "--prompt", prompts[1],
        "--set", "generation.max_new_tokens=12",
    )  # fmt: skip
    texts = [
        tokenizer.decode(by_transformers(model, tokenizer, prompt, 12, chat=True))
        for prompt in prompts
    ]
    assert (code, out) == (0, f"{texts[0]}\n{texts[1]}\n")
    assert "--- 1 of 2" in err


def test_prompts_from_files_and_standard_input(run: Any, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("from a file\n")
    few = ["--json", "--set", "generation.max_new_tokens=1"]
    cases: dict[tuple[str, ...], list[str]] = {
        ("-",): ["from stdin"],
        ("--prompt-file", "-"): ["from stdin"],
        ("--prompt-file", str(tmp_path / "prompt.txt")): ["from a file"],
        ("--prompt", "a", "--prompt-file", str(tmp_path / "prompt.txt"), "-"): [
            "a", "from a file", "from stdin",
        ],
    }  # fmt: skip
    for arguments, prompts in cases.items():
        code, out, err = run("generate", *arguments, *few, stdin="from stdin\n")
        assert code == 0, err
        assert [result["prompt"] for result in json.loads(out)["results"]] == prompts


def test_a_configuration_and_its_overrides(
    run: Any, tmp_path: Path, tiny_target_folder: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"target: {tiny_target_folder}\n"
        f"drafter: {{name: autoregressive, model: {tiny_target_folder}}}\n"
        "policy: {name: fixed, length: 4}\ngeneration: {max_new_tokens: 11}\n"
    )
    arguments = ["generate", str(config), "--no-chat", "--prompt", "the cat", "--json"]
    stats = json.loads(run(*arguments, target=False)[1])["stats"]
    # The first token comes from the prompt's pass, then two rounds of 4 drafted and 1 bonus token.
    assert (stats["new_tokens"], stats["rounds"], stats["tau"]) == (11, 2, 5.0)
    stats = json.loads(run(*arguments, "--set", "policy.length=1", target=False)[1])["stats"]
    assert (stats["rounds"], stats["tau"]) == (5, 2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "no prompt: give --prompt TEXT"),
        (["generate", "-"], "the prompt is empty"),
        (["generate", "-", "--prompt-file", "-"], "standard input can be read only once"),
        (["generate", "--prompt-file", "/not/there"], "--prompt-file /not/there: cannot be read"),
        (["generate", "a.yaml", "b.yaml", "--prompt", "x"], "expected one configuration"),
        (
            ["generate", "/not/there.yaml", "--prompt", "x"],
            "/not/there.yaml: there is no such file",
        ),
        (
            ["generate", "--prompt", "x", "--set", "policy.treshold=1"],
            "--set policy.treshold: unknown key. Did you mean 'threshold'?",
        ),
        (["plugins", "svpi"], "nothing is called 'svpi'. Did you mean 'svip'?"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, run: Any
) -> None:
    code, out, err = run(*arguments, target=arguments[0] == "generate")
    assert (code, out) == (2, "")
    assert err.startswith(f"specdec: {message}")
    assert "Traceback" not in err


def test_debug_shows_the_traceback(run: Any) -> None:
    with pytest.raises(SpecdecError, match="unknown key"):
        run("generate", "--prompt", "x", "--set", "policy.treshold=1", "--debug")


def test_usage_mistakes_exit_with_2(run: Any) -> None:
    assert run("generate", "--promt", "x")[0] == 2
    assert run("no-such-command", target=False)[0] == 2


def test_no_chat_template(run: Any, tmp_path: Path, model: Any, tokenizer: Any) -> None:
    model.save_pretrained(tmp_path)
    bare = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    arguments = ["generate", "--prompt", "the cat", "--set", f"target={tmp_path}", "--json"]
    arguments += ["--set", "generation.max_new_tokens=8"]
    _, out, _ = run(*arguments, target=False)
    expected = by_transformers(model, tokenizer, "the cat", 8, chat=False)
    assert json.loads(out)["results"][0]["token_ids"] == expected
    code, _, err = run(*arguments, "--chat", target=False)
    assert code == 2
    assert "has no chat template; use --no-chat" in err


def test_show_tree_marks_what_was_accepted(run: Any, tiny_target_folder: Path) -> None:
    code, out, err = run(
        "generate", "--prompt", "the cat", "--show-tree", "--set", "generation.max_new_tokens=12",
        "--set", "policy={name: fixed, length: 4}", *own_drafter(tiny_target_folder),
    )  # fmt: skip
    assert code == 0
    assert "✓" not in out
    rounds = re.findall(r"round (\d+): (\d+) drafted, (\d+) accepted", err)
    assert [int(number) for number, _, _ in rounds] == list(range(1, len(rounds) + 1))
    accepted = sum(int(count) for *_, count in rounds)
    assert accepted >= 8
    assert err.count("✓") == accepted


def test_show_tree_of_a_tree(
    tiny_target_folder: Path, tokenizer: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run(
        "generate", "--prompt", "the cat", "--show-tree", "--set", "generation.max_new_tokens=8",
        "--set", "policy={name: fixed, length: 2}", "--set", "drafter.expand=cape",
        *own_drafter(tiny_target_folder),
    )  # fmt: skip
    assert code == 0
    assert err.count("✓") < len(re.findall(r"'[^']*'", err))  # side candidates are not accepted
    assert "├── " in err


# --- chat ----------------------------------------------------------------------------------------


def test_a_conversation(run: Any, model: Any, tokenizer: Any) -> None:
    code, out, err = run(
        "chat", "--set", "generation.max_new_tokens=10",
        stdin="the cat\n/stats\n/policy fixed\n/drafter none\n/policy fixd\n/help\nand you?\n/quit\n",
    )  # fmt: skip
    assert code == 0
    first = tokenizer.decode(
        by_transformers(model, tokenizer, "the cat", 10, chat=True), skip_special_tokens=True
    )
    told = f"the cat\nassistant: {first}\nuser: and you?"
    second = by_transformers(model, tokenizer, told, 10, chat=True)
    assert out == f"{first}\n{tokenizer.decode(second, skip_special_tokens=True)}\n"
    assert re.search(r"10 tokens in [\d.]+ s", err)
    assert "policy.name: unknown policy 'fixd'. Did you mean 'fixed'?" in err
    assert "/reset" in err


def decoder_for(tiny_target_folder: Path, **overrides: Any) -> Any:
    return specdec.load(target=str(tiny_target_folder), **overrides)


def test_a_second_turn_reads_only_what_is_new(
    tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    decoder = decoder_for(tiny_target_folder, generation={"max_new_tokens": 6})
    read: list[int] = []
    told: list[int] = []
    prefill = decoder.target.prefill

    def counting(state: Any, starts: list[int], counts: list[int], features: bool) -> Any:
        read.append(sum(counts))
        told.append(state.lengths[0])
        return prefill(state, starts, counts, features)

    monkeypatch.setattr(decoder.target, "prefill", counting)
    conversation = Conversation(decoder, show_drafts=False)
    conversation.answer("the cat sat on the mat, and the dog sat on the log.")
    conversation.answer("hi")
    assert read[0] == told[0]
    # All of the first prompt is shared; its last token may have to be read again.
    assert 0 < read[1] <= told[1] - told[0] + 1
    conversation.reset()
    conversation.answer("hi")
    assert len(conversation.said) == 2


def test_ctrl_c_stops_the_answer_and_not_the_conversation(
    tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"max_new_tokens": 40, "eos_token_id": []}
    decoder = decoder_for(tiny_target_folder, generation=settings)
    rounds: list[Any] = []

    def press_ctrl_c(record: Any) -> None:
        rounds.append(record)
        if len(rounds) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("specdec.decoder.round_observers", lambda: [press_ctrl_c])
    conversation = Conversation(decoder, show_drafts=False)
    before = signal.getsignal(signal.SIGINT)
    conversation.answer("the cat")
    assert signal.getsignal(signal.SIGINT) is before
    assert conversation.last is not None
    assert 3 <= len(conversation.last.token_ids[0]) < 40
    assert capsys.readouterr().out == f"{conversation.said[1]['content']}\n"
    # What was read and written so far is kept as it should be.
    conversation.answer("go on")
    assert conversation.last is not None
    fresh = decoder.generate(conversation.last.prompts, **settings)
    assert conversation.last.token_ids == fresh.token_ids


def test_accepted_drafts_are_coloured(
    tiny_target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder = decoder_for(
        tiny_target_folder,
        drafter={"name": "autoregressive", "model": str(tiny_target_folder)},
        policy={"name": "fixed", "length": 3},
        generation={"max_new_tokens": 9, "eos_token_id": []},
    )
    Conversation(decoder, show_drafts=True).answer("the cat")
    coloured = capsys.readouterr().out
    plain = Conversation(decoder, show_drafts=False)
    plain.answer("the cat")
    text = capsys.readouterr().out
    assert re.sub(r"\x1b\[\d+m", "", coloured) == text
    drafted = "".join(re.findall(r"\x1b\[32m(.*?)\x1b\[0m", coloured, re.DOTALL))
    assert 0 < len(drafted) < len(text)


# --- check ---------------------------------------------------------------------------------------


def test_check_passes_and_says_what_a_round_costs(run: Any, tiny_target_folder: Path) -> None:
    code, _, err = run("check", *own_drafter(tiny_target_folder))
    assert code == 0, err
    assert len(re.findall(r"^ok +greedy: equal, \d+ tokens", err, re.MULTILINE)) == 4
    assert re.search(
        r"^ok +sampling: 256 samples of 3 tokens follow the target's", err, re.MULTILINE
    )
    assert "plain pass of the target" in err
    assert "diagnosis: " in err


def accept_everything(tree: Any, logits: Any, *_: Any, **__: Any) -> Verdict:
    """A faulty rule: the first branch is taken whatever the target says."""
    rows, depth = tree.tokens.shape
    accepted = tree.valid.sum(1)
    bonus = logits.argmax(-1).gather(1, accepted[:, None])
    room = tree.tokens.new_zeros(rows, 1)
    tokens = torch.cat([tree.tokens, room], 1).scatter(1, accepted[:, None], bonus)
    path = torch.arange(depth + 1).expand(rows, -1)
    return Verdict(path=path, tokens=tokens, accepted=accepted, scores=[])


def test_check_finds_a_faulty_rule(
    run: Any, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = specdec.load(target=str(tiny_target_folder), drafter="ngram")
    monkeypatch.setattr("specdec.loop.verify", accept_everything)
    code, _, err = run("check", "--set", "drafter=ngram", "--set", "policy=fixed")
    assert code == 1
    assert "FAIL" in err
    assert "BUG" in err
    prompt = decoder.tokenizer("the cat sat, the cat sat")["input_ids"]
    assert not check_sampling(decoder, prompt).passed


def test_check_finds_a_rule_without_the_residual(
    tiny_target_folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawing the bonus token from p itself after a rejection is a small and common mistake."""
    drafter = AutoregressiveDrafter(model=noisy(model, 0.3))
    decoder = specdec.load(
        target=str(tiny_target_folder), drafter=drafter, generation={"temperature": 8.0}
    )
    prompt = decoder.tokenizer("the cat sat on the")["input_ids"]
    right = check_sampling(decoder, prompt, samples=2048, batch=512)
    assert right.passed, right
    assert right.drafted > 1000

    def without_residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return p

    monkeypatch.setattr("specdec.verification._residual", without_residual)
    assert not check_sampling(decoder, prompt, samples=2048, batch=512).passed


def test_the_exact_law_is_that_of_sampling_without_drafts(tiny_target_folder: Path) -> None:
    decoder = specdec.load(target=str(tiny_target_folder), drafter="none")
    prompt = decoder.tokenizer("the cat")["input_ids"]
    law = exact_law(decoder, prompt, temperature=4.0)
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    assert len(law) == 64
    decoder.settings = decoder.settings.model_copy(update={"temperature": 4.0})
    assert check_sampling(decoder, prompt, samples=1024, batch=512).passed


def test_a_tie_is_told_from_a_bug(tiny_target_folder: Path, monkeypatch: Any) -> None:
    decoder: Any = specdec.load(target=str(tiny_target_folder), drafter="none")
    decoder.settings = decoder.settings.model_copy(update={"max_new_tokens": 6, "eos_token_id": []})
    prompt = decoder.tokenizer("the cat")["input_ids"]
    written = decoder.generate([prompt]).token_ids[0]
    weight = decoder.target.model.get_output_embeddings().weight.data
    twin = max(set(range(len(weight))) - set(written))  # argmax takes the first of equals
    weight[twin] = weight[written[3]]
    swapped = [*written[:3], twin, *written[4:]]

    def swap(*_: Any, **__: Any) -> Any:
        return type("Output", (), {"token_ids": [swapped]})

    monkeypatch.setattr(decoder, "generate", swap)
    [found] = check_greedy(decoder, [prompt])
    assert found.differs_at == 3
    assert found.gap <= TIE
    assert found.passed
    assert str(found).endswith(": tie")
    weight[twin] = 0
    [found] = check_greedy(decoder, [prompt])
    assert not found.passed
    assert re.fullmatch(r"differs at token 4, top-2 gap .*: BUG", str(found))


# --- demo, plugins, schema -----------------------------------------------------------------------


def test_demo_compares_with_plain_decoding(run: Any, tiny_target_folder: Path) -> None:
    code, out, _ = run(
        "demo", "--prompt", "the cat", "--set", "generation.max_new_tokens=24",
        *own_drafter(tiny_target_folder),
    )  # fmt: skip
    assert code == 0
    for line in ("tokens/s", "speed-up", "tokens per round τ", "acceptance α", "mean draft length"):
        assert line in out
    assert "autoregressive + svip" in out
    assert "The two texts are the same, token by token." in out
    [taus] = re.findall(r"tokens per round τ +([\d.]+) +([\d.]+)", out)
    assert float(taus[0]) == 1.0
    assert float(taus[1]) > 1.0


def test_plugins_lists_and_describes(run: Any) -> None:
    _, out, _ = run("plugins", target=False)
    for kind, entries in plugins.registry().entries.items():
        for name, entry in entries.items():
            line = next(line for line in out.splitlines() if line.split()[:2] == [kind, name])
            assert line.rstrip().endswith(entry.origin)
    _, out, _ = run("plugins", "svip", target=False)
    assert "arXiv 2411.18462" in out
    assert re.search(r"threshold +float > 0 +0\.3 +stop when", out)
    assert "specdec.policies.svip.SVIPPolicy" in out


def test_schema_is_json(run: Any) -> None:
    from specdec.schema import schema

    code, out, _ = run("schema", target=False)
    assert code == 0
    assert json.loads(out) == schema()
