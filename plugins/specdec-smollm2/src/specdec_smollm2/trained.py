"""The drafters that come with this package, as folders that specdec loads.

EAGLE heads and GliDe models use the target's embedding and output layer, so their folders are
complete as they are. The autoregressive drafter shares the target's embedding, and transformers
wants it in the file: it is stored without, and put together with the target's once, in the cache.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from specdec.errors import SpecdecError
from specdec_smollm2.keep import is_intact, make_once, sha256
from specdec_smollm2.target import cache_folder, smollm2_135m

FOLDER = Path(__file__).with_name("drafters")
WEIGHTS = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
OWN = ("config.json", "draft_vocab.json")
OF_TARGET = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files that an autoregressive drafter takes over from its target, where there are such."""


def smollm2_135m_eagle2() -> Path:
    """The folder of the EAGLE-2 head."""
    return FOLDER / "smollm2-135m-eagle2"


def smollm2_135m_glide() -> Path:
    """The folder of the GliDe model."""
    return FOLDER / "smollm2-135m-glide"


def smollm2_135m_ar() -> Path:
    """The folder of the small Llama, which transformers loads; put together first.

    Raises `SpecdecError` when the target is not available, or the folder cannot be kept.
    """
    packaged, target = FOLDER / "smollm2-135m-ar", smollm2_135m()
    # Another drafter or another target makes another folder.
    mark = hashlib.sha256(f"{sha256(packaged / WEIGHTS)} {target}".encode()).hexdigest()[:12]
    folder = cache_folder() / f"{packaged.name}-{mark}"
    if is_intact(folder):
        return folder
    try:
        return make_once(folder, lambda work: put_together(packaged, target, work))
    except OSError as error:
        raise SpecdecError(
            f"smollm2-135m-ar cannot be kept in {folder}: {error}. It takes 80 MB there; "
            "the environment variable SPECDEC_CACHE names another place."
        ) from error


def put_together(packaged: Path, target: Path, folder: Path) -> None:
    """Write the drafter in `packaged` with the target's embedding and tokenizer to `folder`."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    tensors = load_file(packaged / WEIGHTS)
    with safe_open(target / WEIGHTS, "pt") as file:
        tensors[EMBEDDING] = file.get_tensor(EMBEDDING)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    for source, names in ((packaged, OWN), (target, OF_TARGET)):
        for name in names:
            if (source / name).exists():
                shutil.copyfile(source / name, folder / name)


def take_apart(drafter: Path, folder: Path) -> None:
    """Write a trained drafter to `folder` as this package stores it.

    That is its weights without the embedding that it shares with the target, its configuration and
    its vocabulary.
    """
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(drafter / WEIGHTS)
    tensors.pop(EMBEDDING, None)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    for name in OWN:
        if (drafter / name).exists():
            shutil.copyfile(drafter / name, folder / name)
