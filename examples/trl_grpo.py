"""TRL's own GRPOTrainer on Shoal's network, as it comes from the package index: it draws the prompts, scores and trains, the
nodes sample. (pip install trl; tried with TRL 1.16.)

    shoal learner run.toml --external_trainer true --rollout.groups_per_step 0 --endpoint.listen 127.0.0.1:0
    python examples/trl_grpo.py runs/first train.jsonl      # rows {"prompt": text or messages, "answer": text}

Two arguments of GRPOTrainer are all it takes: `rollout_func` samples through `SamplingClient`, and a callback brings weights,
checkpoints and numbers to `LearnerClient`. Each step is sampled under the very weights that the last one made. Kill it whenever
you like: start the learner again with --resume, and this with the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from own_trainer import served  # examples/own_trainer.py
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from learner.client.client import LearnerClient
from learner.client.sampling import SamplingClient


def right_places(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """The reward, any that TRL takes: the share of places at which an answer has the right character."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    pairs = zip(texts, answer, strict=True)
    return [sum(a == b for a, b in zip(text, want, strict=False)) / max(len(text), len(want), 1) for text, want in pairs]


class OnNodes(TrainerCallback):
    """What GRPOTrainer is told of the network: where completions come from, and where weights go."""

    def __init__(self, run_dir: Path) -> None:
        self.client, self.sampling = LearnerClient.connect(run_dir), SamplingClient.connect(run_dir)
        self.start = self.client.resume()
        self.lag = 0
        """steps between the oldest token of the last rollout and the weights that trained on it"""

    def rollout(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: `prompts` holds each prompt as often as it is to be answered."""
        tokenizer, args, step = trainer.processing_class, trainer.args, trainer.state.global_step
        if isinstance(prompts[0], str):
            ids = tokenizer(text=prompts)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
        answers = self.sampling.sample(
            ids, max_tokens=args.max_completion_length, temperature=args.temperature, top_p=args.top_p, min_step=step, seed=step
        )
        self.lag = step - min(span.version.step for answer in answers for span in answer.spans)
        return {
            "prompt_ids": ids, "completion_ids": [list(answer.ids) for answer in answers],
            "logprobs": [list(answer.logprobs) for answer in answers],
        }  # fmt: skip

    def on_train_begin(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **_: Any) -> None:
        self.client.publish(state.global_step, served(model))

    def on_step_end(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **_: Any) -> None:
        self.client.publish(state.global_step, served(model))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "reward" in logs:  # and not what is told of the whole run at its end
            self.client.log(state.global_step, logs | {"reward/mean": logs["reward"], "staleness/max": self.lag})

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        os.sync()  # `commit` names what is on the disk; transformers leaves that to the kernel
        self.client.commit(state.global_step, Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.client.finish()


def train(run_dir: Path, data: Path, *, prompts: int, lr: float, save_steps: int) -> None:
    config = tomllib.loads((run_dir / "config.toml").read_text())
    nodes, rollout = OnNodes(run_dir), config["rollout"]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(config["model"]),
        reward_funcs=right_places,
        train_dataset=Dataset.from_list([json.loads(line) for line in data.read_text().splitlines()]),
        rollout_func=nodes.rollout,
        callbacks=[nodes],
        args=GRPOConfig(
            output_dir=str(run_dir / "checkpoints"), max_steps=config["trainer"]["steps"], learning_rate=lr, seed=config["seed"],
            num_generations=rollout["samples"], max_completion_length=rollout["max_new_tokens"],
            temperature=rollout["temperature"], top_p=rollout["top_p"],
            # One group a forward pass; all groups of a step are sampled at once, under the weights that it trains.
            per_device_train_batch_size=rollout["samples"], gradient_accumulation_steps=prompts,
            # What TRL does with the nodes' log probabilities where it has no vLLM of its own: bad answers that the policy has
            # left behind are masked. Its importance correction goes with use_vllm; here both policies are one, but for rounding.
            off_policy_mask_threshold=0.5,
            bf16=torch.cuda.is_available(), logging_steps=1, save_steps=save_steps, save_total_limit=3, report_to="none",
        ),
    )
    trainer.train(resume_from_checkpoint=str(nodes.start.checkpoint) if nodes.start.checkpoint else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="TRL's GRPOTrainer, sampling on the nodes of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("data", type=Path, help="JSONL with the columns prompt and answer")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step; rollout.samples completions each")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--save-steps", type=int, default=10)
    arguments = parser.parse_args()
    train(arguments.run_dir, arguments.data, prompts=arguments.prompts, lr=arguments.lr, save_steps=arguments.save_steps)
