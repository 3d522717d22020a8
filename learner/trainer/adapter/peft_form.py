"""The adapter's settings as peft writes them: for nodes, for the trainer's own layers and for an export. Must not know torch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from learner.trainer.settings import LoraSection
from p2p.errors import UsageError

FIXED = ("rank", "alpha", "targets", "rslora")
"""Settings that a run keeps: its checkpoints, its versions and its nodes' adapters follow from them."""


def peft_config(lora: LoraSection, model: str | None = None) -> dict[str, Any]:
    """What adapter_config.json holds. Without dropout: the policy that is trained must be the one that generated."""
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha  # some read whole numbers only
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model, "r": lora.rank,
        "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "use_rslora": lora.rslora, "fan_in_fan_out": False,
        "target_modules": lora.targets, "inference_mode": True,
    }  # fmt: skip


def adapter_file(lora: LoraSection, model: str) -> bytes:
    """adapter_config.json of a run, for its nodes; empty where there is no adapter. Of a folder they learn the name alone."""
    name = Path(model).name if Path(model).exists() else model
    return json.dumps(peft_config(lora, name), indent=1).encode() if lora.rank else b""


def check_peft(lora: LoraSection) -> None:
    """UsageError where an adapter is wanted and peft is not installed."""
    if lora.rank and importlib.util.find_spec("peft") is None:
        raise UsageError("trainer.lora.rank: adapters need peft, which is not installed: pip install '.[lora]'")


def check_same_adapter(run_dir: Path, lora: LoraSection) -> None:
    """UsageError where the run in `run_dir` was begun with another adapter, or with none. What cannot be read is another's to
    tell."""
    try:
        before = json.loads((run_dir / "trainer.json").read_text(encoding="utf-8"))
        kept = LoraSection.model_validate(before.get("lora") or {})
    except (OSError, ValueError, AttributeError):
        return
    if not kept.rank and not lora.rank:
        return
    for name in FIXED:
        was, now = getattr(kept, name), getattr(lora, name)
        if was != now:
            raise UsageError(
                f"trainer.lora.{name} = {_told(now)}, and the run in {run_dir} was begun with {_told(was)}: a run keeps its "
                "adapter; set it so, or begin another run"
            )


def _told(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
