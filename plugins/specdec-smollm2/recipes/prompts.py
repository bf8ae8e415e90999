"""Questions for `specdec data` that the target does not think of itself: `python prompts.py OUT`.

What the target asks itself is short. People also paste articles and have them summed up, ask about
passages that a search found, have sentences translated, or ask plain facts and sums. These prompts
are made from public texts, each file at one commit and checked by its hash: news and general texts
of the WMT test sets, the search questions of EfficientQA, the training problems of GSM8K. Only
the prompts come from there; every answer is the target's own. None of the files is a source of
Spec-Bench (it has WMT14, Natural Questions and the GSM8K test set).

OUT receives the files, so that a second run downloads nothing, and `short.jsonl` and `long.jsonl`:
apart, as a batch costs what its longest text costs.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import random
import re
import sys
import urllib.request
from collections import defaultdict
from pathlib import Path

WMT = "wmt-conference/wmt{}-news-systems/{}/txt/"
WMT21 = WMT.format(21, "f41750dadbf2ba6ab01ca5380347d253298a3427")
WMT22 = WMT.format(22, "20240a2e96a50e823ea8cdf37fd8af52547146e3")
WMT23 = WMT.format(23, "99b5b9de2a535c2c5542fd4ec404682903299894")
WMT24 = WMT.format(24, "bfa937ee53586aa173d68657b89b8642693f7b66")
NQ = "google-research-datasets/natural-questions/fb26a3073b1fe636c97302890a27b491d6530130/nq_open/"
GSM8K = "openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/"

GERMAN = {
    WMT21 + "sources/newstest2021.de-en.src.de": "b8afa1e06d881bbf",
    WMT21 + "references/newstest2021.en-de.ref.A.de": "3363b4a490bdcf55",
    WMT22 + "sources/generaltest2022.de-en.src.de": "662ca5e5013644da",
    WMT22 + "references/generaltest2022.en-de.ref.A.de": "bbe97089c8da4eef",
    WMT23 + "sources/generaltest2023.de-en.src.de": "660b0831ab9e3663",
    WMT24 + "references/en-de.refA.txt": "eba7b43c767cdb50",
}
ENGLISH = {
    WMT21 + "sources/newstest2021.en-de.src.en": "63925ded38b5354d",
    WMT21 + "references/newstest2021.cs-en.ref.A.en": "a8e98d49a781577d",
    WMT21 + "references/newstest2021.de-en.ref.A.en": "35a42d27dfc433fc",
    WMT21 + "references/newstest2021.ha-en.ref.A.en": "bbfa828c21da7f61",
    WMT21 + "references/newstest2021.is-en.ref.A.en": "78c402136b8c1fd4",
    WMT21 + "references/newstest2021.ja-en.ref.A.en": "6e8e622b7335b517",
    WMT21 + "references/newstest2021.ru-en.ref.A.en": "94561c3b072c95b3",
    WMT21 + "references/newstest2021.zh-en.ref.A.en": "4eee78956e540546",
    WMT22 + "sources/generaltest2022.en-de.src.en": "4774249b2156cb63",
    WMT22 + "references/generaltest2022.cs-en.ref.B.en": "117bd5438eecfc25",
    WMT22 + "references/generaltest2022.de-en.ref.A.en": "c1125ea38eeaad50",
    WMT22 + "references/generaltest2022.ja-en.ref.A.en": "bc3197e2736bf8c3",
    WMT22 + "references/generaltest2022.ru-en.ref.A.en": "7a7d4bd5642d68fe",
    WMT22 + "references/generaltest2022.uk-en.ref.A.en": "64469db5a10051df",
    WMT22 + "references/generaltest2022.zh-en.ref.A.en": "ae4830781cf59d46",
    WMT23 + "sources/generaltest2023.en-de.src.en": "097b5ccf5552f62c",
    WMT23 + "references/generaltest2023.de-en.ref.refA.en": "0d1e571a586673f9",
    WMT23 + "references/generaltest2023.he-en.ref.refA.en": "a907d3b23edb180c",
    WMT23 + "references/generaltest2023.ja-en.ref.refA.en": "64d7c255e9765b40",
    WMT23 + "references/generaltest2023.ru-en.ref.refA.en": "6e79d854b8d9f98d",
    WMT23 + "references/generaltest2023.uk-en.ref.refA.en": "d0eb8a8c6d726e9c",
    WMT23 + "references/generaltest2023.zh-en.ref.refA.en": "5dd09a10f2775a1d",
    WMT24 + "sources/en-de.txt": "37d25467e7aa8386",
}
QUESTIONS = {
    NQ + "NQ-open.efficientqa.dev.1.1.no-annotations.jsonl": "98db3591bf61106a",
    NQ + "NQ-open.efficientqa.test.1.1.no-annotations.jsonl": "eef2c7f0197dd26c",
}
PROBLEMS = {
    GSM8K + "train.jsonl": "17f347dc51477c50",
}

ARTICLE = 2600
"""Characters of an article, about 600 tokens; Spec-Bench's have 3,000."""
PASSAGE = 550
PASSAGES = 5
COUNTS = {"translation": 4500, "summary": 1200, "passages": 900, "question": 3600, "sum": 2000}
TRANSLATE = (
    *["Translate German to English: {}"] * 3,
    "Translate into English: {}",
    "What does this mean in English?\n{}",
)
SUMMARIZE = (
    *["Summarize: {}"] * 3,
    "Summarize this text in a few sentences:\n{}",
    "What are the main points of this article?\n\n{}",
)


def main(out: Path) -> None:
    draw = random.Random(0)
    german = [line for line in lines(out, GERMAN) if 20 <= len(line) <= 400 and "#" not in line]
    english = lines(out, ENGLISH)
    questions = [as_question(json.loads(line)["question"]) for line in lines(out, QUESTIONS)]
    problems = [json.loads(line)["question"] for line in lines(out, PROBLEMS)]
    search = Search(pieces(english, PASSAGE))
    for texts in (german, questions, problems):
        draw.shuffle(texts)
    made = {
        "translation": [draw.choice(TRANSLATE).format(text) for text in german],
        "summary": [draw.choice(SUMMARIZE).format(text) for text in pieces(english, ARTICLE)],
        "passages": [
            "\n".join([*search(question), question]) for question in questions[: COUNTS["passages"]]
        ],
        "question": questions[COUNTS["passages"] :],
        "sum": problems,
    }
    rows: dict[str, list[str]] = {"short": [], "long": []}
    for category, prompts in made.items():
        chosen = draw.sample(prompts, min(COUNTS[category], len(prompts)))
        length = "long" if category in ("summary", "passages") else "short"
        rows[length] += [
            json.dumps({"category": category, "prompt": prompt}, ensure_ascii=False) + "\n"
            for prompt in chosen
        ]
        print(f"{category}: {len(chosen)} of {len(prompts)}")
    for length, texts in rows.items():
        draw.shuffle(texts)
        (out / f"{length}.jsonl").write_text("".join(texts), encoding="utf-8")


def lines(out: Path, files: dict[str, str]) -> list[str]:
    """The lines of files, downloaded unless they are there; a file with another hash is refused."""
    found: list[str] = []
    for name, digest in files.items():
        path = out / name.replace("/", "+")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(f"https://raw.githubusercontent.com/{name}") as answer:
                path.write_bytes(answer.read())
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest()[:16] != digest:
            sys.exit(f"{path} is not the file that this recipe was made for: delete it, try again")
        found += [line.strip() for line in data.decode("utf-8").splitlines() if line.strip()]
    return found


def pieces(texts: list[str], size: int) -> list[str]:
    """Runs of sentences of about `size` characters, begun anew at what looks like a headline."""
    made, text = [], ""
    for line in texts:
        headline = line[-1].isalnum() and len(line) < 100
        if len(text) > size or (headline and len(text) > size / 2):
            made.append(text)
            text = ""
        text = f"{text} {line}".strip()
    return [text for text in made if len(text) < 1.5 * size]


class Search:
    """Finds passages by the rare words that they share with a question."""

    def __init__(self, passages: list[str]) -> None:
        self.passages = passages
        self.holding: dict[str, list[int]] = defaultdict(list)
        for number, passage in enumerate(passages):
            for word in words(passage):
                self.holding[word].append(number)

    def __call__(self, question: str) -> list[str]:
        scores: dict[int, float] = defaultdict(float)
        for word in words(question):
            for number in self.holding.get(word, ()):
                scores[number] += len(self.passages) / len(self.holding[word])
        return [
            self.passages[number] for number in heapq.nlargest(PASSAGES, scores, scores.__getitem__)
        ]


def words(text: str) -> list[str]:
    return sorted(set(re.findall(r"\w{4,}", text.lower())))


def as_question(words: str) -> str:
    return words[0].upper() + words[1:] + "?"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
