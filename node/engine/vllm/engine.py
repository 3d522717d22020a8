"""The vLLM engine: `LLMEngine` in this very process, stepped by us, its weights replaced in place between two steps.

Must not know processes, sockets or peers. All that depends on vLLM's version is in `compat`. Draws are our own (`draws`), so a
sequence that comes from a transformers node goes on here as it would have there. `weights` knows where weights lie.

An update follows the routes of the changed tensors, then every changed value is compared, bit for bit, with the state
file. What differs is loaded again through the model's own loading and compared again; failing that, the old weights are put
back and compared; failing that, EngineBroken. `pause_s` does not contain the recomputed keys and values: with kv_policy
"recompute" vLLM preempts what runs, and its next steps prefill it as they would a new prompt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from node.engine.flat_model import MappedState, changed_names, check_layout
from node.engine.port import CommitResult, EngineBroken, EngineStats, StateFile
from node.engine.rate import TokenRate
from node.engine.requests import completion_limit, finish_before_start
from node.engine.rows import EngineRow, pinned_elsewhere
from node.engine.settings import VllmSettings
from node.engine.slots import HoldingCore
from node.engine.vllm import compat as vllm_compat
from node.engine.vllm.model import LoadPlan, plan_model
from p2p.errors import Refusal
from p2p.layout import ADAPTER
from p2p.protocol.rollout import Generate, TokenEvent

_NOTHING = np.zeros(1, np.float32)


class VllmCore(HoldingCore):
    """See EngineCore for the contract."""

    def __init__(self, settings: VllmSettings | None = None) -> None:
        vllm_compat.check_version()
        super().__init__()
        self.settings = settings or VllmSettings()
        self._engine: Any = None
        self._plan: LoadPlan | None = None
        self._wanted: dict[str, torch.Tensor] = {}
        """the model's tensors by the state's names: shapes and dtypes only"""
        self._staged: tuple[StateFile, tuple[str, ...]] | None = None
        self._keys: dict[str, str] = {}
        """held request -> its name inside vLLM, a new one each time, so that a late output of an aborted request matches none"""
        self._rows: dict[str, tuple[EngineRow, str]] = {}
        """name inside vLLM -> row, and the key under which `drawn` lists its draws"""
        self._instant: dict[str, str] = {}
        """held requests that need no token -> their finish"""
        self._last_key = 0
        self._adapter: Any = None
        """with which requests are computed: a `LoRARequest`, under a name and a number for each version"""
        self._last_adapter = 0
        self._rate = TokenRate()

    # --- loading -----------------------------------------------------------------------------------------------------

    def load(self, model_dir: Path, state: StateFile) -> None:
        """See `EngineCore.load`. A model with the plan of the running engine is loaded into that engine. Refusal also for a model
        whose weights vLLM cannot replace in place."""
        self.abort()
        self._ended, self._staged = [], None
        plan = plan_model(model_dir, state, self.settings, on_cpu=vllm_compat.on_cpu())
        if self._engine is not None and plan == self._plan:
            self._reload(state)
        else:
            self.close()
            MappedState(state)  # a file that is cut short is refused here, before anything is built
            self._engine = vllm_compat.build_engine(plan, state, self.settings)
            self._plan, self._vocab, self._max_context = plan, plan.vocab, plan.context
            self._wanted = {
                spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
                for spec in state.layout.tensors
            }
            self._check_new(state)
        self._version = state.version

    def _check_new(self, state: StateFile) -> None:
        try:
            loose = sorted({name for rank in self._ask("shoal_loose") for name in rank})
            why = vllm_compat.why_not_in_place(self._engine) or (
                f"vLLM keeps {', '.join(loose[:3])} in another form than it is loaded in" if loose else ""
            )
            if why:
                raise Refusal(f"this model cannot be updated in place: {why}", version=state.version)
            self._ask("shoal_open", state, ())
            if wrong := self._differing("staged", self._base(self._wanted)):
                raise Refusal(f"vLLM does not hold {wrong[0]!r} as the state file does", version=state.version)
            self._stage_adapter(state)
            self._take_adapter(state)
            self._ask("shoal_settle")
        except BaseException:
            self.close()
            raise

    def _reload(self, state: StateFile) -> None:
        """Load another state into the running engine."""
        check_layout(state.layout, self._wanted)
        self._ask("shoal_open", state, ())
        self._stage_adapter(state)
        self._replace(state, self._base(self._wanted), way_back=False)
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def _loaded(self) -> Any:
        if self._engine is None:
            raise RuntimeError("no model is loaded")
        return self._engine

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """Call `method` in every worker; returns what each rank answers."""
        return self._engine.collective_rpc(method, args=args)

    # --- sequences ---------------------------------------------------------------------------------------------------

    def add(self, request: Generate) -> None:
        """See `EngineCore.add`."""
        self._loaded()
        row = self._checked(request)
        if finish := finish_before_start(request, self._max_context):
            self._instant[request.request_id] = finish
        else:
            self._enter(row)
        self.held[request.request_id] = row

    def _enter(self, row: EngineRow) -> None:
        """Hand a row to vLLM, which goes on after the tokens that the row has."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from node.engine.vllm.draws import ask

        request = row.request
        self._last_key += 1
        key = str(self._last_key)
        params = SamplingParams(
            temperature=0.0, max_tokens=completion_limit(request, self._max_context) - len(row.ids), detokenize=False,
            stop_token_ids=sorted({t for t in request.stop_ids if 0 <= t < self._vocab}), ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args=ask(key, request.seed, request.temperature, request.top_p, len(row.ids)),
        )  # fmt: skip
        name = self._engine.add_request(key, self._prompt(row.tokens()), params, lora_request=self._adapter)
        self._keys[request.request_id] = name
        self._rows[name] = row, key

    def _prompt(self, tokens: list[int]) -> dict[str, Any]:
        """A prompt for vLLM. The version is its cache salt, so that only requests of one version share blocks of keys and
        values."""
        return {"prompt_token_ids": tokens, "cache_salt": str(self._version)}

    def step(self) -> list[TokenEvent]:
        """See `EngineCore.step`. RuntimeError when vLLM made another token than the one that was drawn."""
        events, self._ended = self._ended, []
        for name, finish in self._instant.items():
            events.append(self.held.pop(name).last_event(self._version, finish))
        self._instant.clear()
        if self._rows:
            self._advance(events)
        return events

    def _advance(self, events: list[TokenEvent]) -> list[Any]:
        """One step of vLLM: appends its tokens to `events`. Returns its outputs of requests that ended (a score is one)."""
        outputs, ended = vllm_compat.step(self._engine)
        drawn = self._ask("shoal_drawn")[0] if outputs else {}
        made = len(events)
        for output in outputs:
            if (found := self._rows.get(output.request_id)) is not None:
                events.append(self._event(*found, output, drawn))
        now = time.perf_counter()
        self._last_step = now if self.held else None
        self._rate.add(now, sum(len(event.ids) for event in events[made:]))
        return ended

    def _event(self, row: EngineRow, key: str, output: Any, drawn: dict[str, tuple[int, np.ndarray]]) -> TokenEvent:
        made, version = output.new_token_ids, self._version
        finish = "" if output.finish_reason is None else str(output.finish_reason)
        if finish not in ("", "stop", "length"):
            self._forget(row)
            return row.last_event(version, "error", f"vLLM ended it: {finish}")
        token, logprob = drawn.get(key, (-1, _NOTHING))
        if len(made) != 1 or made[0] != token:
            raise RuntimeError(f"vLLM made {made} where {token} was drawn: its sampling is not ours")
        if not math.isfinite(logprob[0]):
            vllm_compat.withdraw(self._engine, [] if finish else [output.request_id])
            self._forget(row)
            return row.last_event(version, "error", "the model's logits are not numbers")
        start = len(row.ids)
        row.ids.append(token)
        if finish:
            self._forget(row)
        return TokenEvent.of(row.request.request_id, start, (token,), logprob, version=version, finish=finish)

    def _forget(self, row: EngineRow) -> None:
        del self.held[row.request.request_id]
        del self._rows[self._keys.pop(row.request.request_id)]

    def _take(self, names: list[str]) -> list[EngineRow]:
        vllm_compat.withdraw(self._engine, [self._keys[n] for n in names if n in self._keys])
        gone = [self.held[n] for n in names]
        for row in gone:
            if self._instant.pop(row.request.request_id, None) is None:
                self._forget(row)
            else:
                del self.held[row.request.request_id]
        return gone

    # --- versions ----------------------------------------------------------------------------------------------------

    def stage(self, state: StateFile) -> None:
        """See `EngineCore.stage`. Refusal when the state has other tensors than the model."""
        self._loaded()
        self._staged = None
        self._ask("shoal_drop")
        check_layout(state.layout, self._wanted)
        names = self._base(changed_names(state, self._wanted))
        self._ask("shoal_open", state, names)
        self._stage_adapter(state)
        self._staged = state, names

    def commit(self) -> CommitResult:
        """See `EngineCore.commit`."""
        if self._staged is None:
            raise RuntimeError("nothing is staged")
        begin = time.perf_counter()
        since = self._waiting_since(begin)
        (state, names), self._staged = self._staged, None
        apply_s = self._replace(state, names, way_back=state.changed is not None)
        self._ended += self.interrupt(pinned_elsewhere(self.held, state.version))
        self._version = state.version
        if self._adapter is not None:
            # A request keeps the adapter that it was entered with: all go on as requests of the new one, which prefill what they
            # have. Blocks of the old one are not found under the new name.
            self._enter_again([row for row, _ in self._rows.values()])
        elif self.settings.kv_policy == "recompute":
            self._engine.reset_prefix_cache(reset_running_requests=True)
        else:  # under "keep", rows without a token must not share blocks that were computed with the old weights
            self._enter_again([row for row, _ in self._rows.values() if len(row.ids) == len(row.request.prefix_ids)])
        return CommitResult(state.version, time.perf_counter() - since, apply_s)

    def _enter_again(self, rows: list[EngineRow]) -> None:
        """Take these out of vLLM and enter them as new ones, which go on after the tokens that they have."""
        vllm_compat.withdraw(self._engine, [self._keys[row.request.request_id] for row in rows])
        for row in rows:
            del self._rows[self._keys[row.request.request_id]]
            self._enter(row)

    def _base(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of `names` that are the base model's."""
        return tuple(name for name in names if not name.startswith(ADAPTER))

    def _stage_adapter(self, state: StateFile) -> None:
        """Enter the adapter of the state that is staged, if it has one, under a number that none had before."""
        if self._plan is not None and self._plan.adapter is not None:
            self._last_adapter += 1
            self._ask("shoal_stage_adapter", self._plan.adapter, self._last_adapter)

    def _take_adapter(self, state: StateFile) -> None:
        """Compute with the staged adapter, and forget the one before. Refusal, with that one in place again, when vLLM does not
        hold it as the state does; EngineBroken when that fails too."""
        if self._plan is None or self._plan.adapter is None:
            return
        number, before = self._last_adapter, self._adapter
        try:
            if wrong := [layer for rank in self._ask("shoal_use_adapter", number) for layer in rank]:
                raise Refusal(f"the engine does not hold the adapter of {wrong[0]!r} as the state has it", version=state.version)
        except BaseException as error:
            if before is None:
                raise
            if any(self._ask("shoal_use_adapter", before.lora_int_id)):
                raise EngineBroken(f"an adapter did not get in place ({error}), nor did the one before it") from error
            raise
        self._adapter = vllm_compat.adapter_request(str(state.version), number)
        self._ask("shoal_keep_adapter", number)

    def _replace(self, state: StateFile, names: tuple[str, ...], *, way_back: bool) -> float:
        """Put the staged state in place of the served one and compare; returns the seconds that the first copy took. On failure
        the old weights are put back; EngineBroken when that fails, without a `way_back`, or once the new adapter was taken.

        The way back is the file of the served state, which is good only while nobody writes to it. A caller that names the
        changed tensors vouches for that. A shadow that fell behind its engine (a full disk) cannot name them, and may already be
        writing the new state to that file.
        """
        begin, adapter = time.perf_counter(), self._adapter
        try:
            self._ask("shoal_fill", "staged", names)
            apply_s = time.perf_counter() - begin
            if wrong := self._differing("staged", names):
                # Compare all tensors, not only `names`: the fault may have hit others too.
                self._ask("shoal_reload", "staged")
                wrong = self._differing("staged", self._base(self._wanted))
            if wrong:
                reason = f"the engine does not hold {wrong[0]!r} as the state file does, after a dense reload too"
                raise Refusal(reason, version=state.version)
            filled = time.perf_counter()
            self._take_adapter(state)
            apply_s += time.perf_counter() - filled
            self._ask("shoal_settle")
        except BaseException as error:
            if not way_back:
                raise EngineBroken(f"an update of everything failed: {error}") from error
            if self._adapter is not adapter:
                raise EngineBroken(f"an update failed when its adapter was in place: {error}") from error
            self._restore(error)
            raise
        return apply_s

    def _restore(self, cause: BaseException) -> None:
        """Put all of the served state back. EngineBroken when that fails."""
        every = self._base(self._wanted)
        try:
            self._ask("shoal_fill", "served", every)
            wrong = self._differing("served", every)
        except Exception as error:
            raise EngineBroken(f"an update failed ({cause}) and so did the way back ({error})") from error
        if wrong:
            raise EngineBroken(f"an update failed ({cause}) and {wrong[0]!r} is not what it was before")
        self._ask("shoal_drop")

    def _differing(self, which: str, names: tuple[str, ...]) -> list[str]:
        return sorted({name for rank in self._ask("shoal_differing", which, names) for name in rank})

    # --- the rest ----------------------------------------------------------------------------------------------------

    def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """See `EngineCore.score`: one prefill, in steps in which running sequences go on; the next `step` returns their
        tokens."""
        from vllm import SamplingParams

        from node.engine.vllm.draws import ask

        self._loaded()
        self._check_score(prompt_ids, completion_ids)
        n = len(completion_ids)
        if not n:
            return np.empty(0, np.float32)
        # The last token is not part of the prompt: a context that is full has no room for the one that vLLM would make then.
        *tokens, last = *prompt_ids, *completion_ids
        self._last_key += 1
        key, heat = str(self._last_key), temperature or 1.0
        self._ask("shoal_score_at", heat)
        params = SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True, prompt_logprobs=0 if n > 1 else None,
            extra_args=ask(key, 0, heat, top_p=1.0, position=0, token=last),
        )  # fmt: skip
        self._engine.add_request(key, self._prompt(tokens), params, lora_request=self._adapter)
        scored = None
        while scored is None:
            scored = next((o for o in self._advance(self._ended) if o.request_id == key and o.finished), None)
        rows = scored.prompt_logprobs[len(prompt_ids) :] if n > 1 else []
        scores = [row[t].logprob for row, t in zip(rows, completion_ids[:-1], strict=True)]
        return np.array([*scores, *self._ask("shoal_drawn")[0][key][1]], dtype=np.float32)

    def stats(self) -> EngineStats:
        """See `EngineCore.stats`; `kv_bytes` is the memory for keys and values that is in use."""
        if self._engine is None:
            return EngineStats(0, 0, 0, tokens_per_s=0.0, kv_bytes=0, version=self._version)
        now, rate = vllm_compat.occupancy(self._engine), self._rate
        return EngineStats(
            now.running, now.waiting, rate.tokens, tokens_per_s=rate.per_second(time.perf_counter()), kv_bytes=now.kv_bytes,
            version=self._version, kv_tokens=now.kv_tokens, arithmetic=vllm_compat.arithmetic(self._engine),
            keeps=self.settings.kv_policy == "keep",
        )  # fmt: skip

    def close(self) -> None:
        """End the engine inside vLLM; another can be loaded afterwards."""
        if self._engine is not None:
            engine, self._engine, self._plan = self._engine, None, None
            self._adapter = None
            self.held, self._rows, self._keys, self._staged = {}, {}, {}, None
            vllm_compat.dispose(engine)
