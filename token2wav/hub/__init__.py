"""Names of models in place of folders: `org/name`, `org/name@revision`, or an alias.

A name stands for a model on the Hugging Face Hub. Only the files that the decoder needs are
fetched, by the client `huggingface_hub` with its cache, token, endpoint and offline mode. Where the
decoder is a part of a larger `.safetensors` file, only its tensors are fetched, by ranges. The
folder of a pulled model is in `HF_HOME/token2wav`: links to the files in the cache of the client,
and files with the tensors of a decoder.
"""

from __future__ import annotations

import re
from pathlib import Path

from token2wav.hub.download import Part, Pull
from token2wav.hub.errors import HubError, as_sentences
from token2wav.known_models import known_model

__all__ = ["MODEL_HELP", "HubError", "Part", "model_folder", "pull"]

MODEL_HELP = "model folder, or a name: org/name, org/name@revision, or an alias"
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


def model_folder(model: str | Path, part: Part = "decoder") -> Path:
    """Returns the folder of a model, which is pulled first if `model` is a name.

    A folder that exists is preferred to a name. Any text without the form of a name is returned as
    a path.

    Args:
        part: needed files: the decoder, the networks that make voices and tokens from recordings,
            or the configuration of the decoder.

    Raises:
        HubError: the model cannot be pulled.
    """
    text = str(model)
    if Path(model).is_dir() or not (name := _name(text)):
        return Path(model)
    return pull(*name, part)


def _name(text: str) -> tuple[str, str] | None:
    """Returns repository and revision of a name; None if the text can only be a path."""
    alias, _, revision = text.partition("@")
    if known := known_model(alias):
        return known.repo, revision or "main"
    match = _NAME.fullmatch(text)
    if match is None or text.startswith("."):
        return None
    return match["repo"], match["revision"] or "main"


def pull(repo: str, revision: str = "main", part: Part = "decoder") -> Path:
    """Fetches the missing files of a model, checks them, and returns the folder.

    Files of one commit are fetched once. If the hub cannot be reached, the commit that the revision
    had at the last pull is used.

    Args:
        revision: branch, tag or commit.
        part: as in `model_folder`.
    """
    try:
        import huggingface_hub  # noqa: F401 - imported here, because paths need no hub
    except ModuleNotFoundError:
        raise HubError(
            f"{repo}: no such folder here, and a model of the hub needs huggingface_hub; run: "
            "pip install 'token2wav[hub]'"
        ) from None
    from filelock import FileLock
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    base = Path(constants.HF_HOME) / "token2wav" / repo.replace("/", "--")
    name = repo if revision == "main" else f"{repo}@{revision}"
    task = Pull(repo, revision, name, base, part)
    with as_sentences(name):
        if folder := task.pulled_folder():  # which may be on a volume that can only be read
            return folder
        if constants.HF_HUB_OFFLINE:
            raise OfflineModeIsEnabled
        base.mkdir(parents=True, exist_ok=True)
        with FileLock(base / ".lock"):  # a second process waits, and finds the files
            return task.run()
