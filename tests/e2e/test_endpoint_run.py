"""The endpoint of a real run: a learner that trains and nodes over loopback, before the unmodified `openai` package.

What it says of each token is compared with what transformers computes from the checkpoint of the very version that it names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from netem.bench.beside.served_run import ServedRun
from tests.support.watchdog import PATIENCE_S, until

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.e2e

HELD = 2
"""the step at which training is held, so that one version is served"""

STOPS = [f"{digit}{digit}" for digit in "0123456789"]
"""strings that end training's completions here: each is two tokens"""

PROMPT = "314159>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRun]:
    settings = {
        "task": {"stop": STOPS}, "requests": {"serving_share": 0.5, "hold_s": 600.0}, "status": {"samples_per_step": 16},
        "trainer": {"checkpoint_keep": 2000, "lr": 3e-3},
    }  # fmt: skip
    with ServedRun(tmp_path_factory.mktemp("endpoint"), settings, wait_s=PATIENCE_S) as run:
        run.hold(HELD)
        run.start(2)
        run.wait_for_version(f"1.{HELD}")
        yield run


def client(run: ServedRun, **options: Any) -> Any:
    return openai.OpenAI(base_url=f"{run.url}/v1", api_key=run.key, timeout=PATIENCE_S, **options)


def completion(run: ServedRun, prompt: Any, **options: Any) -> Any:
    """The one choice of /v1/completions."""
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    with client(run) as ask:
        (choice,) = ask.completions.create(model="policy", prompt=prompt, logprobs=0, extra_body=extra, **options).choices
    return choice


def by_transformers(run: ServedRun, step: int, ids: Sequence[int], start: int, temperature: float, top_p: float) -> list[float]:
    """Log probabilities of `ids[start:]` under a version's weights, each of the distribution that it is drawn from."""
    import torch
    from transformers import AutoModelForCausalLM, TemperatureLogitsWarper, TopPLogitsWarper

    from learner.trainer.checkpoints.checkpoint import load_weights
    from learner.trainer.trained import WholeModel

    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32, attn_implementation="eager")
    if step:
        load_weights(run.run_dir / "checkpoints" / f"step_{step}", WholeModel(model))
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0, start - 1 : -1].double()
    if temperature:  # a greedy token is told under temperature 1
        if temperature != 1:
            logits = TemperatureLogitsWarper(temperature)(None, logits)
        if top_p < 1:
            logits = TopPLogitsWarper(top_p)(None, logits)
    drawn = torch.tensor(list(ids[start:]))
    return list(torch.log_softmax(logits, -1).gather(-1, drawn[:, None])[:, 0].tolist())


def check_logprobs(
    run: ServedRun, prompt: Sequence[int], ids: Sequence[int], told: Sequence[float], spans: Sequence[dict[str, Any]],
    temperature: float = 1.0, top_p: float = 1.0,
) -> None:  # fmt: skip
    """Span by span: keys and values are computed anew under a newer version, so its weights saw all that stands before."""
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])] and spans[-1]["end"] == len(ids)
    for span in spans:
        upto = [*prompt, *ids[: span["end"]]]
        step = int(span["version"].partition(".")[2])
        right = by_transformers(run, step, upto, len(prompt) + span["start"], temperature, top_p)
        assert told[span["start"] : span["end"]] == pytest.approx(right, abs=1e-4), span


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 0.9), (0.0, 1.0)])
def test_log_probabilities_are_those_of_the_weights_and_the_same_on_each_route(
    run: ServedRun, temperature: float, top_p: float
) -> None:
    exact = {"X-Shoal-Exact-Version": f"1.{HELD}"}
    common: Any = {"temperature": temperature, "top_p": top_p, "seed": 7, "max_tokens": 60, "extra_headers": exact}
    with client(run) as ask:
        chat = ask.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": PROMPT}], logprobs=True,
            extra_body={"return_token_ids": True}, **common,
        )  # fmt: skip
    prompt = chat.prompt_token_ids
    (said,) = chat.choices
    ids, told = said.token_ids, [one.logprob for one in said.logprobs.content]
    assert 0 < len(ids) == len(told) == chat.usage.completion_tokens
    assert said.weight_versions == [{"version": f"1.{HELD}", "start": 0, "end": len(ids)}]
    check_logprobs(run, prompt, ids, told, said.weight_versions, temperature, top_p)

    plain = completion(run, prompt, **common)
    same = pytest.approx(told, abs=1e-5)  # to rounding: it depends on who else is decoded at once
    assert plain.token_ids == ids and plain.logprobs.token_logprobs == same
    body = {"token_ids": prompt, "sampling_params": {
        "temperature": temperature, "top_p": top_p, "seed": 7, "max_tokens": 60, "logprobs": 1,
    }}  # fmt: skip
    answer = httpx.post(
        f"{run.url}/inference/v1/generate", json=body, headers={"Authorization": f"Bearer {run.key}", **exact}, trust_env=False,
        timeout=PATIENCE_S,
    )  # fmt: skip
    (found,) = answer.json()["choices"]
    assert found["token_ids"] == ids and [one["logprob"] for one in found["logprobs"]["content"]] == same
    assert found["weight_versions"] == said.weight_versions


def test_a_stop_string_of_several_tokens_ends_the_answer_and_the_node_s_work(run: ServedRun) -> None:
    whole, seed = "", 0
    while len(whole) < 40:  # a random model may end soon
        seed += 1
        whole = completion(run, PROMPT, seed=seed, max_tokens=900).text
    stop = next(whole[at : at + 2] for at in range(10, 30) if whole.find(whole[at : at + 2]) == at)
    before = set(run.made())
    cut = completion(run, PROMPT, seed=seed, max_tokens=900, stop=[stop, "never to be seen"])
    assert cut.text == whole.partition(stop)[0] and cut.finish_reason == "stop" and cut.stop_reason == stop
    assert len(cut.token_ids) == len(cut.text) + 2 == len(cut.logprobs.token_logprobs)
    until("the node to stop", lambda: not run.status()["requests"]["running"]["serving"], run.children)
    made = {name: sum(count for _, count in parts) for name, parts in run.made().items() if name not in before}
    assert all(count <= len(whole) + 1 for count in made.values())
    until("its tokens to end", lambda: run.made() == run.made(), run.children)


def test_training_s_completions_end_with_the_token_that_completes_a_stop_string(run: ServedRun) -> None:
    samples = [json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()]
    texts = [sample["completion"] for sample in samples]
    assert texts and any(text.endswith(tuple(STOPS)) for text in texts)
    assert not any(stop in text[:-1] for text in texts for stop in STOPS)
    assert all(s["finish"] == "stop" for s in samples if s["completion"].endswith(tuple(STOPS)))
    assert {s["finish"] for s in samples} == {"stop", "length"}


def test_a_stream_goes_on_when_its_node_is_killed_with_the_very_tokens_it_would_have_had(run: ServedRun) -> None:
    exact = {"X-Shoal-Exact-Version": f"1.{HELD}"}
    seed = next(s for s in range(1, 100) if len(completion(run, PROMPT, seed=s, max_tokens=600).token_ids) >= 300)
    options: Any = {"max_tokens": 600, "seed": seed, "extra_headers": exact}
    undisturbed = completion(run, PROMPT, **options)
    before, killed = set(run.made()), ""
    ids: list[int] = []
    told: list[float] = []
    parts: list[Any] = []
    with client(run, max_retries=0) as ask:
        stream = ask.completions.create(
            model="policy", prompt=PROMPT, logprobs=0, stream=True, extra_body={"return_token_ids": True}, **options
        )
        for part in stream:
            (choice,) = part.choices
            ids += choice.token_ids
            told += choice.logprobs.token_logprobs
            parts.append(choice)
            if not killed and len(ids) >= 20:
                ((killed, _), *_) = next(made for name, made in run.made().items() if name not in before)
                run.kill_node(killed)
    assert killed and ids == undisturbed.token_ids and told == pytest.approx(undisturbed.logprobs.token_logprobs, abs=1e-4)
    assert "".join(part.text for part in parts) == undisturbed.text
    assert parts[-1].finish_reason == undisturbed.finish_reason and len(told) == len(ids)
    assert parts[-1].weight_versions == [{"version": f"1.{HELD}", "start": 0, "end": len(ids)}]
    makers = {node for name, made in run.made().items() if name not in before for node, _ in made}
    assert makers == {"node-1", "node-2"} and run.status()["requests"]["moved"]["serving"] >= 1
    run.start_node(killed)
    until("it to be back", lambda: len(run.serving()) == 2, run.children)


def test_an_answer_over_several_versions_is_right_under_each(run: ServedRun) -> None:
    """Last: from here on the run trains."""
    run.release()

    def ask(seed: int) -> Any:
        return completion(run, PROMPT, seed=seed, max_tokens=900)

    found: list[Any] = []
    with ThreadPoolExecutor(4) as threads:
        for first in range(1, 400, 4):
            found = [c for c in threads.map(ask, range(first, first + 4)) if len(c.weight_versions) > 1]
            if found:
                break
    assert found, "no answer took long enough for a newer version"
    prompt = found[0].prompt_token_ids
    for choice in found:
        check_logprobs(run, prompt, choice.token_ids, choice.logprobs.token_logprobs, choice.weight_versions)
