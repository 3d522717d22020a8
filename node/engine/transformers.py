"""The embedded engine: any full-attention Hugging Face causal LM, decoded by our own slot batcher over DynamicCache.

Must not know processes, sockets or peers. One thread; a step admits waiting sequences (one batched prefill, equal
sequences run once), decodes one token for every running one, and retires what ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from node.engine.adapter import add_adapter, read_adapter
from node.engine.flat_model import (
    MappedState,
    build_model,
    changed_names,
    check_layout,
    check_size,
    compute_dtype,
    context_length,
    fill,
    fill_new,
    load_config,
    state_tensors,
)
from node.engine.kvrows import KVRows, prefill
from node.engine.port import CommitResult, EngineStats, StateFile
from node.engine.rate import TokenRate
from node.engine.rows import EngineRow, Rows, pinned_elsewhere
from node.engine.sampling import SamplingParams, sample
from node.engine.settings import TransformersSettings
from node.engine.slots import SlotCore
from p2p.errors import Refusal
from p2p.few_sizes import filled_up, multiple_on
from p2p.gpu_attention import without_plans_by_shape
from p2p.protocol.rollout import Generate, TokenEvent


class TransformersCore(SlotCore):
    """See EngineCore for the contract."""

    def __init__(self, settings: TransformersSettings | None = None) -> None:
        super().__init__()
        self.settings = settings or TransformersSettings()
        self._model: torch.nn.Module | None = None
        self._config: Any = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._staged: tuple[MappedState, tuple[str, ...]] | None = None
        self._kv: KVRows | None = None
        self._params: SamplingParams | None = None
        self._ready: torch.Tensor | None = None
        """[running rows, vocab]: what follows each running row, where a commit has computed it already"""
        self._next_ids = np.empty((0, 1), dtype=np.int64)
        self._rate = TokenRate()
        self._arithmetic = ""
        self._multiple = 1
        """what a prefill's width is filled up to"""

    def load(self, model_dir: Path, state: StateFile) -> None:
        """See `EngineCore.load`. Refusal also when the settings ask for cuda and torch sees no CUDA device."""
        settings = self.settings
        use_cuda = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
        if use_cuda and not torch.cuda.is_available():
            raise Refusal("the engine is set to cuda and torch sees no CUDA device")
        device = torch.device("cuda" if use_cuda else "cpu")
        without_plans_by_shape(torch)
        dtype = getattr(torch, compute_dtype(state, settings.dtype, on_cpu=not use_cuda))
        config = load_config(model_dir, settings.max_context)
        check_size(config, state.layout, settings.attention)
        model = build_model(config, device=device, dtype=dtype, attention=settings.attention)
        adapter, tensors = read_adapter(model_dir, state.layout), state_tensors(model)
        if adapter is not None:
            tensors |= add_adapter(model, adapter, state.layout)
        check_layout(state.layout, tensors)
        fill_new(tensors, MappedState(state))
        text = config.get_text_config()
        self._model, self._config, self._tensors, self._device = model, config, tensors, device
        self._multiple = multiple_on(device.type, str(dtype))
        self._arithmetic = f"transformers/{str(dtype).removeprefix('torch.')}/{device.type}"
        self._version, self._vocab = state.version, int(text.vocab_size)
        self._max_context = context_length(config, settings.max_context)
        self._staged = None
        self.abort()
        self._ended = []
        self._requeue()  # nothing is left to run, and rows to come are bounded by the new context

    def _loaded(self) -> torch.nn.Module:
        if self._model is None:
            raise RuntimeError("no model is loaded")
        return self._model

    def add(self, request: Generate) -> None:
        """See `EngineCore.add`."""
        self._loaded()
        super().add(request)

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """See `EngineCore.step`: a decode of the running rows, then the admission of waiting ones."""
        events, self._ended = self._ended, []
        if not self.held:
            return events
        model = self._loaded()
        running = len(self._rows)
        if running and self._kv is not None and self._params is not None:
            logits, self._ready = self._ready, None
            if logits is None:
                logits = self._kv.decode(model, torch.from_numpy(self._next_ids).to(self._device))
            ids, logprobs = sample(logits, self._params, self._rows.positions)
            self._advance(ids, logprobs, events)
        # After the decode: an admitted row gets its first token from the prefill's logits, so each running row makes exactly one
        # token in this step.
        self._admit(model, events)
        made = sum(len(e.ids) for e in events)
        now = time.perf_counter()
        self._last_step = now if self.held else None
        self._rate.add(now, made)
        return events

    def _advance(self, ids: np.ndarray, logprobs: np.ndarray, events: list[TokenEvent]) -> None:
        """Give each running row its token and retire the rows that ended."""
        going = self._append(self._rows, ids, logprobs, events)
        self._next_ids = ids[:, None]
        if len(going) < len(ids):
            self._keep(going)

    def _keep(self, index: np.ndarray) -> None:
        super()._keep(index)
        self._next_ids = self._next_ids[index]
        if self._ready is not None:
            self._ready = self._ready[torch.from_numpy(index).to(self._device)] if len(index) else None
        if self._kv is not None:
            if len(index):
                self._kv.select(index)
            else:
                self._kv = None
        self._refresh_params()

    def _refresh_params(self) -> None:
        self._params = self._build_params(self._rows.rows) if len(self._rows) else None

    def _build_params(self, rows: Sequence[EngineRow]) -> SamplingParams:
        asked = [r.request for r in rows]
        return SamplingParams.build(
            [r.seed for r in asked], [r.temperature for r in asked], [r.top_p for r in asked], self._device
        )

    def _admit(self, model: torch.nn.Module, events: list[TokenEvent]) -> None:
        """Prefill the waiting rows that fit, in order of arrival, and draw the first token of each."""
        taken: list[EngineRow] = []
        sequences: dict[tuple[int, ...], int] = {}
        which: list[int] = []
        width = 0
        while len(self._rows) + len(taken) < self.settings.max_running and (row := self._first_waiting(events)):
            tokens = tuple(row.tokens())
            grown = max(width, filled_up(len(tokens), self._multiple))
            if taken and grown * (len(sequences) + (tokens not in sequences)) > self.settings.prefill_tokens:
                break
            self._waiting.popleft()
            width = grown
            which.append(sequences.setdefault(tokens, len(sequences)))
            taken.append(row)
        if not taken:
            return
        kv, logits = prefill(model, self._config, list(sequences), self._device, multiple=self._multiple)
        index = np.array(which, dtype=np.int64)
        if len(sequences) < len(taken):
            logits = logits[torch.from_numpy(index).to(self._device)]
        params = self._build_params(taken)
        fresh = Rows(self._max_context)
        fresh.extend(taken)
        ids, logprobs = sample(logits, params, fresh.positions)
        going = self._append(fresh, ids, logprobs, events)
        if not len(going):
            return
        if len(sequences) < len(taken) or len(going) < len(taken):
            kv.select(index[going])
        if self._kv is None:
            self._kv = kv
        else:
            self._kv.join(kv)
        self._rows.extend([taken[i] for i in going])
        self._next_ids = np.concatenate([self._next_ids, ids[going][:, None]])
        self._refresh_params()

    def stage(self, state: StateFile) -> None:
        """See `EngineCore.stage`. Refusal when the state has other tensors than the model."""
        self._loaded()
        self._staged = None
        check_layout(state.layout, self._tensors)
        names = changed_names(state, self._tensors)
        self._staged = MappedState(state), names

    def commit(self) -> CommitResult:
        """See `EngineCore.commit`."""
        if self._staged is None:
            raise RuntimeError("nothing is staged")
        model = self._loaded()
        begin = time.perf_counter()
        since = self._waiting_since(begin)
        (source, names), self._staged = self._staged, None
        undo = fill(self._tensors, source, names)
        try:
            self._synchronize()
            applied = time.perf_counter()
            self._ended += self.interrupt(pinned_elsewhere(self.held, source.version))
            if self.settings.kv_policy == "recompute" and len(self._rows):
                self._recompute(model)
                self._synchronize()
        except BaseException:
            undo()
            self._requeue()
            raise
        self._version = source.version
        return CommitResult(source.version, time.perf_counter() - since, applied - begin)

    def _requeue(self) -> None:
        """Send the running rows back to the head of the queue: their cache is gone, their tokens are not."""
        self._waiting.extendleft(reversed(self._rows.rows))
        self._rows = Rows(self._max_context)
        self._kv, self._params, self._ready = None, None, None
        self._next_ids = np.empty((0, 1), dtype=np.int64)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def _recompute(self, model: torch.nn.Module) -> None:
        """Rebuild the running rows' cache under the weights now in place. Their last tokens are run with the rest: the next
        step draws from what follows them, and the first token of the version needs no further pass over the model."""
        sequences = [row.tokens() for row in self._rows.rows]
        self._kv, self._ready = None, None
        logits: list[torch.Tensor] = []
        kv: KVRows | None = None
        at = 0
        while at < len(sequences):
            stop, width = at + 1, filled_up(len(sequences[at]), self._multiple)
            while stop < len(sequences):
                width = max(width, filled_up(len(sequences[stop]), self._multiple))
                if width * (stop + 1 - at) > self.settings.prefill_tokens:
                    break
                stop += 1
            part, following = prefill(model, self._config, sequences[at:stop], self._device, multiple=self._multiple)
            logits.append(following)
            if kv is None:
                kv = part
            else:
                kv.join(part)
            at = stop
        self._kv, self._ready = kv, torch.cat(logits)

    @torch.inference_mode()
    def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """See `EngineCore.score`."""
        model = self._loaded()
        self._check_score(prompt_ids, completion_ids)
        n = len(completion_ids)
        if not n:
            return np.empty(0, np.float32)
        ids = torch.tensor([[*prompt_ids, *completion_ids]], device=self._device)
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=n).logits[0]
        logp = torch.log_softmax(logits.double() / (temperature or 1.0), dim=-1)
        return logp.gather(-1, ids[0, -n:, None])[:, 0].float().cpu().numpy()

    def stats(self) -> EngineStats:
        """See `EngineCore.stats`."""
        kv_bytes = self._kv.nbytes if self._kv is not None else 0
        rate = self._rate.per_second(time.perf_counter())
        running, waiting, version = len(self._rows), len(self._waiting), self._version
        return EngineStats(
            running, waiting, self._rate.tokens, tokens_per_s=rate, kv_bytes=kv_bytes, version=version,
            arithmetic=self._arithmetic, keeps=self.settings.kv_policy == "keep",
        )  # fmt: skip

    def close(self) -> None:
        self.abort()
        self._model, self._tensors, self._staged = None, {}, None
