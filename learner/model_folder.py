"""A model's folder as Hugging Face lays it out, read without its weights: where it is, how many token ids, which tokenizer.

Must not know torch, runs or nodes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.tasks.prompting import stop_ids
from p2p.errors import UsageError
from p2p.protocol.descriptor import FILES

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""A folder with none of these has no tokenizer; transformers would make up an empty one for a known architecture."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What rollouts need of a model."""

    path: Path
    vocab_size: int
    """number of token ids that the model knows"""
    tokenizer: Any
    """transformers' own"""
    stop_ids: tuple[int, ...]
    """tokens that end an answer"""
    context: int = 0
    """most tokens of prompt and answer together, by config.json; 0: not known"""


def open_model_folder(model: str) -> ModelFolder:
    """`model` is a folder, or a hub id, of which config and tokenizer are fetched: weights are the trainer's business. UsageError
    in one line when it is no model or lacks one of them."""
    path = _find(model)
    size = check_model_folder(path)
    tokenizer = _tokenizer(path)
    context = number_in(read_model_config(path), "max_position_embeddings") or 0
    return ModelFolder(path, size, tokenizer, stop_ids(tokenizer, _eos(path)), context)


def check_model_folder(folder: Path) -> int:
    """The number of token ids of a model, by config.json. UsageError for a folder that is no model's or has no tokenizer; whether
    the tokenizer loads takes longer to find out."""
    size = number_in(read_model_config(folder), "vocab_size")
    if size is None:
        raise UsageError(f"{folder}/config.json names no vocab_size")
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise UsageError(f"{folder} has no tokenizer")
    return size


def first_line(error: BaseException) -> str:
    """What an error says, without the pages that may follow."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def find_here(model: str) -> Path | None:
    """The folder of a model that is on this machine: `model` itself, or of a hub id its snapshot in the cache; None for a hub id
    that would have to be downloaded. UsageError when it can be neither."""
    path = _local(model)
    if path is not None:
        return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        raise UsageError(f"{model!r} is neither a local folder nor a hub id") from None
    return Path(found).parent if isinstance(found, str) else None


def _local(model: str) -> Path | None:
    """The folder `model`; None when it can only be a hub id."""
    path = Path(model)
    if path.is_dir():
        return path
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UsageError(f"no model folder {model}")
    return None


def _find(model: str) -> Path:
    path = _local(model)
    if path is not None:
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(FILES)))
    except Exception as error:
        raise UsageError(f"{model} is neither a local folder nor a model on the hub: {first_line(error)}") from None


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json. UsageError when it cannot be read."""
    try:
        values = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        raise UsageError(f"{folder} has no config.json that can be read: not a model folder") from None
    return values if isinstance(values, dict) else {}


def number_in(values: dict[str, Any], key: str) -> int | None:
    """A number of config.json, or of the text part of a model that has several."""
    text = values.get("text_config")
    found = next((v[key] for v in (values, text) if isinstance(v, dict) and v.get(key)), None)
    return found if isinstance(found, int) else None


def size_in_words(folder: Path) -> str:
    """Which model it is, as far as config.json tells by its size: "qwen3, 28 layers of 1024, 151936 token ids". UsageError when
    it cannot be read."""
    values = read_model_config(folder)
    layers, width, ids = (number_in(values, key) or 0 for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    return f"{values.get('model_type', 'a model')!s:.40}, {layers} layers of {width}, {ids} token ids"


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        raise UsageError(f"{folder} has no tokenizer that loads: {first_line(error)}") from None


def _eos(folder: Path) -> Any:
    """What generation_config.json says ends an answer: an id, a list of ids, or None."""
    generation = folder / "generation_config.json"
    if not generation.exists():
        return None
    try:
        return json.loads(generation.read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        raise UsageError(f"{generation} cannot be read: not a model folder") from None
