"""A loop of your own with turns: a game that this program plays with the policy on the nodes, token ids in and token ids out.

    shoal learner run.toml --external_trainer true --rollout.groups_per_step 0 --endpoint.listen 127.0.0.1:0
    python examples/own_loop.py runs/first

The game: guess a digit; where it is wrong you hear "+" (it is more), "-" (less) or "?" (that was no digit), and guess again.
Each turn's prompt is the very ids of the turns before: nothing is tokenised twice. What the game wrote is read and not learned.
Weights and checkpoints go the way of examples/own_trainer.py, from which this takes what it has already.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from own_trainer import RATIO_CAP, pad, save, served  # examples/own_trainer.py
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.client.client import LearnerClient
from learner.client.sampling import SamplingClient

PROMPT, TURNS = "0-9?", 2


@dataclass
class Episode:
    secret: int
    ids: list[int]
    """prompt, and all turns after it"""
    mask: list[int]
    """1 for what the model sampled"""
    logprobs: list[float]
    """of what it sampled, nats; 0 elsewhere"""
    versions: list[str] = field(default_factory=list)
    reward: float = 0.0
    over: bool = False

    def add(self, ids: list[int], logprobs: list[float] | None = None) -> None:
        """Sampled tokens with their log probabilities, or the game's without."""
        self.ids += ids
        self.mask += [int(logprobs is not None)] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)

    def answer(self, text: str) -> str:
        """What the game says to a guess; "" when it is over."""
        digits = [c for c in text if c in "0123456789"]
        guess = int(digits[-1]) if digits else None
        if guess == self.secret:
            self.reward, self.over = 1.0, True
            return ""
        return "?" if guess is None else "+" if guess < self.secret else "-"


def play(sampling: SamplingClient, tokenizer: Any, secrets: list[int], step: int, rollout: dict[str, Any]) -> list[Episode]:
    """An episode for each secret, under the weights after `step` steps. All take their turns together."""
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False)
    episodes = [Episode(secret, list(prompt), [0] * len(prompt), [0.0] * len(prompt)) for secret in secrets]
    for turn in range(TURNS):
        playing = [one for one in episodes if not one.over]
        answers = sampling.sample(
            [one.ids for one in playing], max_tokens=rollout["max_new_tokens"], temperature=rollout["temperature"],
            min_step=step, seed=step * TURNS + turn,
        )  # fmt: skip
        for one, made in zip(playing, answers, strict=True):
            one.add(list(made.ids), list(made.logprobs))
            one.versions += [str(span.version) for span in made.spans]
            said = one.answer(tokenizer.decode(made.ids, skip_special_tokens=True))
            if turn + 1 < TURNS:
                one.add(tokenizer.encode(said, add_special_tokens=False))
    return episodes


def policy_loss(model: torch.nn.Module, episodes: list[Episode], temperature: float) -> torch.Tensor:
    """REINFORCE with the group's mean as baseline, for the episodes of one secret: the mean over sampled tokens."""
    device = next(model.parameters()).device
    rewards = torch.tensor([one.reward for one in episodes], device=device)
    advantages = rewards - rewards.mean()  # [G]
    ids = pad([torch.tensor(one.ids) for one in episodes]).to(device)  # [G, T]
    mask = pad([torch.tensor(one.mask, dtype=torch.float32) for one in episodes]).to(device)[:, 1:]
    behaviour = pad([torch.tensor(one.logprobs) for one in episodes]).to(device)[:, 1:]
    logits = model(input_ids=ids[:, :-1]).logits.float() / temperature  # [G, T - 1, V]
    logp = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None])[:, :, 0]
    ratio = torch.exp(logp.detach() - behaviour).clamp(max=RATIO_CAP)
    return -(advantages[:, None] * ratio * logp * mask).sum() / mask.sum()


def train(run_dir: Path, *, groups: int, lr: float) -> None:
    config = tomllib.loads((run_dir / "config.toml").read_text())
    rollout, device = config["rollout"], "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32).to(device).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    tokenizer = AutoTokenizer.from_pretrained(config["model"])
    client, sampling = LearnerClient.connect(run_dir), SamplingClient.connect(run_dir)
    start = client.resume()
    if start.checkpoint is not None:
        state = torch.load(start.checkpoint / "state.pt", map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    client.publish(start.step, served(model))

    for step in range(start.step, config["trainer"]["steps"]):
        draw = random.Random(f"{config['seed']} {step}")
        secrets = [draw.randrange(10) for _ in range(groups)]
        samples = rollout["samples"]
        episodes = play(sampling, tokenizer, [secret for secret in secrets for _ in range(samples)], step, rollout)
        for at in range(0, len(episodes), samples):
            (policy_loss(model, episodes[at : at + samples], rollout["temperature"]) / groups).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        client.commit(step + 1, save(run_dir / "checkpoints" / f"step_{step + 1}", model, optimizer))
        client.publish(step + 1, served(model))
        shutil.rmtree(run_dir / "checkpoints" / f"step_{step - 1}", ignore_errors=True)
        mean = sum(one.reward for one in episodes) / len(episodes)
        client.log(step + 1, {"reward/mean": mean, "optim/grad_norm": norm})
        with open(run_dir / "episodes.jsonl", "a") as file:
            file.writelines(json.dumps({"step": step + 1} | asdict(one)) + "\n" for one in episodes)
        print(f"step {step + 1}: reward {mean:.3f}", flush=True)
    client.finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A loop of your own, with a game of two turns.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--groups", type=int, default=8, help="secrets of a step; rollout.samples episodes each")
    parser.add_argument("--lr", type=float, default=1e-6)
    arguments = parser.parse_args()
    train(arguments.run_dir, groups=arguments.groups, lr=arguments.lr)
