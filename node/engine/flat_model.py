"""A Hugging Face causal LM built from a folder without weights, and filled from a flat state file.

Must not know requests, batches or sampling. Tensor names are the model's own: `named_parameters()` without
duplicates (a tied weight once, under the name that call gives) and the persistent buffers.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.initialization import no_init_weights

from node.engine.port import StateFile
from p2p.errors import Refusal
from p2p.layout import Layout
from p2p.limits import GIB, MAX_TENSORS

COUNTED = ("layer", "expert", "head", "block", "depth", "stage")
"""Words in the name of a number of config.json that counts parts of a model. No model has more parts than a state has tensors."""

UNBUILT = ("rope", "theta", "factor", "position", "length", "window", "token", "seed")
"""Words in the name of a number of config.json that nothing is built by, or what is counted by `check_size`."""

MOST = 1 << 24
"""The largest whole number of any other name: the widest layers and largest vocabularies are a sixteenth of it. Code that reads a
configuration makes lists as long as it says."""

MOST_BUFFERS = GIB
"""Bytes of tables that a model computes for itself, beside its state: positions' angles, masks."""


def state_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name -> each tensor of the model's state; they share the model's own storage."""
    tensors: dict[str, torch.Tensor] = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=True)}
    persistent = model.state_dict(keep_vars=True)
    tensors.update({n: b for n, b in model.named_buffers(remove_duplicate=True) if n in persistent})
    return tensors


def context_length(config: Any, asked: int) -> int:
    """Tokens that a sequence may have: `asked`, but at most the model's own context; 0 asks for all of it. Refusal when neither
    the configuration nor `asked` gives a number."""
    room = int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0)
    if not room and not asked:
        raise Refusal(f"{config.model_type} does not say how long its context is: set max_context")
    return min(asked or room, room or asked)


def compute_dtype(state: StateFile, asked: str, *, on_cpu: bool) -> str:
    """Name of the dtype to compute in: `asked`; for "auto" float32 on a CPU, else the floating dtype of most of the state's
    bytes."""
    if asked != "auto":
        return asked
    if on_cpu:
        return "float32"
    sizes: dict[str, int] = {}
    for spec in state.layout.tensors:
        if spec.dtype in ("float32", "bfloat16", "float16"):
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.nbytes
    return max(sizes, key=lambda d: sizes[d]) if sizes else "float32"


def changed_names(state: StateFile, known: Collection[str]) -> tuple[str, ...]:
    """The tensors that installing `state` must write: those it names as changed, or all `known` ones. Refusal for an unknown
    name."""
    names = tuple(known) if state.changed is None else tuple(state.changed)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise Refusal(f"changed tensor {unknown[0]!r} is not in the state", version=state.version)
    return names


def check_numbers(model_dir: Path) -> None:
    """Refusal when config.json has a number that no model has: it may be a stranger's."""
    try:
        values = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # whoever reads it as a configuration says what is wrong with it
    waiting: list[tuple[str, object]] = [("", values)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(name, one) for one in value]
        elif isinstance(value, int) and not any(word in name for word in UNBUILT):
            most = MAX_TENSORS if any(word in name for word in COUNTED) else MOST
            if abs(value) > most:
                raise Refusal(f"config.json: {name[:80]} is {value:.3g}, over {most}: there is no such model")


def check_size(config: Any, layout: Layout, attention: str) -> None:
    """Refusal when the model of this configuration is larger than the state that it is to be filled from: found out without
    memory for either."""
    text = config.get_text_config()
    layers = int(getattr(text, "num_hidden_layers", 0) or 0)
    if layers > len(layout.tensors):
        raise Refusal(f"config.json has {layers} layers, and the state {len(layout.tensors)} tensors")
    model = build_model(config, device=torch.device("meta"), dtype=torch.float32, attention=attention)
    tensors = state_tensors(model)
    values, have = sum(t.numel() for t in tensors.values()), sum(s.nbytes // s.itemsize for s in layout.tensors)
    if values > have:
        raise Refusal(f"the model of config.json has {values} values, and the state {have}")
    tables = sum(b.numel() * b.element_size() for name, b in model.named_buffers() if name not in tensors)
    if tables > MOST_BUFFERS:
        raise Refusal(f"the model of config.json keeps tables of {tables} bytes, over {MOST_BUFFERS}")


def read_config(model_dir: Path) -> Any:
    """The folder's configuration. Refusal when it is unreadable, or of a model that cannot generate."""
    check_numbers(model_dir)
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever transformers raises at a file that a stranger may have written
        raise Refusal(f"model folder {model_dir}: {(str(error).splitlines() or [type(error).__name__])[0]}") from error
    if config.is_encoder_decoder:
        raise Refusal(f"{config.model_type} is an encoder-decoder, not a causal LM")
    return config


def load_config(model_dir: Path, max_context: int) -> Any:
    """As `read_config`. Refusal also when the model asks for what the slot batcher cannot do exactly.

    `max_context` (tokens) is what the engine will serve, 0 for all the model allows.
    """
    config = read_config(model_dir)
    try:
        layers = DynamicCache(config=config).layers
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise Refusal(f"{config.model_type}: no key-value cache can be built for it: {error!r}") from error
    odd = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    kinds = sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - {"full_attention"})
    if odd or kinds or not layers:
        raise Refusal(
            f"{config.model_type}: layers of kind {', '.join(kinds + odd) or 'unknown'} are not full attention; "
            "the transformers engine would decode them wrongly (use vLLM)"
        )
    served = context_length(config, max_context)
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or served
    if rope.get("rope_type") in ("dynamic", "longrope") and max(served, max_context) > original:
        raise Refusal(
            f"{config.model_type}: {rope['rope_type']} rotary scaling depends on the longest row of a batch; "
            f"set max_context to at most {original}"
        )
    return config


def build_model(config: Any, *, device: torch.device, dtype: torch.dtype, attention: str) -> torch.nn.Module:
    """The empty model, in evaluation mode. Refusal when transformers knows no causal LM of this configuration, or
    its forward does not take per-row positions (rows of a batch start at different columns)."""
    try:
        with torch.device(device), no_init_weights():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
    except (ValueError, KeyError, ImportError) as error:
        raise Refusal(f"{config.model_type}: {str(error).splitlines()[0]}") from error
    takes = set(inspect.signature(model.forward).parameters)
    lacks = {"position_ids", "attention_mask", "past_key_values", "logits_to_keep"} - takes
    if lacks:
        raise Refusal(f"{config.model_type}: its forward does not take {', '.join(sorted(lacks))}")
    model.tie_weights()  # no_init_weights leaves this out too
    model.eval()
    model.requires_grad_(False)
    if (head := model.get_output_embeddings()) is not None:
        head.register_forward_pre_hook(_plain_strides)
    return model


def _plain_strides(layer: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The head's input [rows, columns, hidden] as if it were not the last columns of a longer one: torch multiplies a cut of
    several dimensions by batches, and on a CPU copies the whole vocabulary projection for it (bf16: 55 ms of a pass of 200)."""
    hidden, *rest = given
    return hidden.reshape(-1, hidden.shape[-1]).view(hidden.shape), *rest


def check_layout(layout: Layout, tensors: dict[str, torch.Tensor]) -> None:
    """Refusal unless `layout` names exactly `tensors`, each of the same shape and of a dtype that converts."""
    missing, unexpected = sorted(tensors.keys() - layout.by_name), sorted(layout.by_name.keys() - tensors)
    for what, names in (("misses", missing), ("has unexpected", unexpected)):
        if names:
            raise Refusal(f"state {what} {len(names)} tensors: {', '.join(names[:3])}")
    for spec in layout.tensors:
        tensor = tensors[spec.name]
        if spec.shape != tuple(tensor.shape):
            raise Refusal(f"tensor {spec.name!r}: state has shape {spec.shape}, the model wants {tuple(tensor.shape)}")
        if getattr(torch, spec.dtype).is_floating_point != tensor.is_floating_point():
            raise Refusal(f"tensor {spec.name!r}: state has {spec.dtype}, the model wants {tensor.dtype}")


def write_state(model: torch.nn.Module, path: Path, dtype: str = "float32") -> Layout:
    """Write the model's state as a flat file, floating-point tensors as `dtype`; returns its layout."""
    return write_tensors(state_tensors(model), path, dtype)


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, dtype: str = "float32") -> Layout:
    """As `write_state`, of these tensors."""
    kinds = {n: dtype if t.is_floating_point() else str(t.dtype).removeprefix("torch.") for n, t in tensors.items()}
    layout = Layout.build((n, kinds[n], tuple(t.shape)) for n, t in tensors.items())
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for spec in layout.tensors:
        values = tensors[spec.name].to("cpu", getattr(torch, spec.dtype)).contiguous().flatten()
        flat[spec.offset : spec.stop] = values.view(torch.uint8)
    path.write_bytes(flat.numpy().tobytes())
    return layout


class MappedState:
    """A state file's tensors, mapped read-only (copy on write) and never loaded whole. Refusal when it is cut short."""

    def __init__(self, state: StateFile) -> None:
        self.layout, self.version = state.layout, state.version
        try:
            have = state.path.stat().st_size
            if have < state.layout.nbytes:
                reason = f"state file of {have} bytes, its layout needs {state.layout.nbytes}"
                raise Refusal(reason, version=state.version)
            self._bytes = np.memmap(state.path, np.uint8, mode="c") if have else np.empty(0, np.uint8)
        except OSError as error:
            raise Refusal(f"state file {state.path}: {error.strerror or error}", version=state.version) from error

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the file's bytes as the named tensor (CPU, the state's dtype)."""
        spec = self.layout.by_name[name]
        dtype = getattr(torch, spec.dtype)
        if not spec.nbytes:
            return torch.empty(spec.shape, dtype=dtype)
        count = spec.nbytes // spec.itemsize
        return torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=spec.offset).view(spec.shape)


@torch.no_grad()
def fill_new(tensors: dict[str, torch.Tensor], source: MappedState) -> None:
    """Fill a model that nobody uses yet; the old values are not kept."""
    for name, target in tensors.items():
        target.copy_(source.tensor(name))


def fill(tensors: dict[str, torch.Tensor], source: MappedState, names: Iterable[str]) -> Callable[[], None]:
    """Copy the named tensors of `source` in place, converting dtypes. All or nothing: on any exception what was
    overwritten is put back before it is raised again. Returns what undoes it all later; while that is held, so is a
    copy of every overwritten tensor."""
    replaced: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def undo() -> None:
        for target, old in replaced:
            target.copy_(old)

    with torch.no_grad():
        try:
            for name in names:
                target = tensors[name]
                replaced.append((target, target.clone()))
                target.copy_(source.tensor(name))
        except BaseException:
            undo()
            raise
    return undo
