"""Your own trainer on Shoal's network: plain PyTorch, REINFORCE with group baselines (GRPO without clip), nothing else.

    shoal learner run.toml --external_trainer true      # the head: nodes join it, it waits for a trainer
    python examples/own_trainer.py runs/first           # this file: the trainer, on the learner's machine

Everything it knows of the network is `learner.client.client.LearnerClient`, whose docstring says what each call promises. Kill it
whenever you like: start the learner again with --resume, and this with the same command.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tomllib
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from learner.client.client import LearnerClient
from learner.client.mismatch import NodeMismatch
from learner.client.port import BY_NODE
from learner.trajectory import Group

RATIO_CAP = 2.0
"""Largest importance weight of a token: it was generated under weights some steps old."""


def served(model: torch.nn.Module) -> dict[str, tuple[str, np.ndarray]]:
    """What nodes are to hold: every parameter once under its first name, as bf16, its bits as unsigned integers. (A model
    with persistent buffers needs those too.)"""
    bits = {name: p.detach().to(torch.bfloat16).cpu().contiguous().view(torch.int16) for name, p in model.named_parameters()}
    return {name: ("bfloat16", b.numpy().view(np.uint16)) for name, b in bits.items()}


def group_loss(model: torch.nn.Module, group: Group, temperature: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(sum over the group's sequences of their mean policy loss, log probability of each token [G, T], mean importance weight).
    One forward: they share a prompt, and under causal attention no token sees the padding behind it."""
    device, prompt = next(model.parameters()).device, group.trajectories[0].prompt_ids
    rewards = torch.tensor(group.rewards)
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).to(device)  # [G]
    tokens = pad([torch.tensor(t.completion_ids) for t in group.trajectories]).to(device)  # [G, T]
    behaviour = pad([torch.tensor(t.logprobs) for t in group.trajectories]).to(device)
    mask = pad([torch.ones(len(t.completion_ids)) for t in group.trajectories]).to(device)
    for row, t in zip(mask, group.trajectories, strict=True):
        for gap in t.given:  # what an environment wrote is read, and not learned
            row[gap.start : gap.stop] = 0.0
    ids = torch.cat([torch.tensor(prompt, device=device).expand(len(tokens), -1), tokens], dim=1)
    logits = model(input_ids=ids[:, :-1]).logits[:, len(prompt) - 1 :].float() / temperature  # [G, T, V]
    logp = torch.log_softmax(logits, dim=-1).gather(2, tokens[:, :, None])[:, :, 0]  # [G, T]
    ratio = torch.exp(logp.detach() - behaviour).clamp(max=RATIO_CAP) * mask
    loss = -(advantages[:, None] * ratio * logp).sum(dim=1) / mask.sum(dim=1)
    return loss.sum(), logp.detach(), float(ratio.sum() / mask.sum())


def pad(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def save(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """A checkpoint that is whole and on the disk when this returns: only then may `commit` name it."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with open(temporary / "state.pt", "wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)  # of a crash between save and commit
    temporary.rename(folder)
    for directory in (folder, folder.parent):
        handle = os.open(directory, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return folder


def train(run_dir: Path, lr: float) -> None:
    config = tomllib.loads((run_dir / "config.toml").read_text())
    steps, temperature = config["trainer"]["steps"], config["rollout"]["temperature"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32).to(device).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)

    client = LearnerClient.connect(run_dir)
    start = client.resume()
    if start.checkpoint is not None:
        state = torch.load(start.checkpoint / "state.pt", map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    client.publish(start.step, served(model))

    watch = NodeMismatch()
    for step in range(start.step, steps):
        rewards: list[float] = []
        ratios: list[float] = []
        for batch in client.batches(step):  # while the rest of the step's groups are still being generated
            for group in batch.groups:
                loss, logp, ratio = group_loss(model, group, temperature)
                for t, own in zip(group.trajectories, logp.tolist(), strict=True):
                    watch.add(t, own[: len(t.completion_ids)])
                # How many groups the step will have is known from the start, so the mean is, too.
                (loss / (batch.total * len(group.trajectories))).backward()
                rewards += group.rewards
                ratios.append(ratio)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        client.commit(step + 1, save(run_dir / "checkpoints" / f"step_{step + 1}", model, optimizer))
        if client.due(step + 1):
            client.publish(step + 1, served(model))
        shutil.rmtree(run_dir / "checkpoints" / f"step_{step - 1}", ignore_errors=True)
        mean = sum(rewards) / len(rewards)
        metrics = {"reward/mean": mean, "optim/grad_norm": norm, "ratio/mean": sum(ratios) / len(ratios)}
        client.log(step + 1, metrics | {BY_NODE: watch.take()})  # the head compares the nodes by it
        print(f"step {step + 1}: reward {mean:.3f}", flush=True)
    client.finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An own trainer in plain PyTorch.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--lr", type=float, default=1e-6)
    arguments = parser.parse_args()
    train(arguments.run_dir, arguments.lr)
