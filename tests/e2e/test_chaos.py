"""Nodes and learners killed with SIGKILL in the midst of a run: nothing lost, nothing twice, and the same tokens as ever.

The weights are frozen, so that what was generated can be compared with what one engine makes that nobody disturbs. In
`make test` one kill of each kind; with SHOAL_NIGHTLY=1 also kills in the midst of episodes, and twenty of nodes and three of
learners, with and without frozen weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.rollouts.group_spec import mix
from learner.trajectory import Trajectory
from netem.bench.chaos.account import ChaosAccount, differing
from netem.bench.chaos.run import GAME, GROUPS, MAX_NEW_TOKENS, SAMPLES, SEED, Chaos, ChaosSettings, player, random_model
from netem.bench.chaos.short_lives import ShortLives
from node.engine.flat_model import write_state
from node.engine.port import StateFile
from node.engine.settings import TransformersSettings
from node.engine.transformers import TransformersCore
from p2p.protocol.rollout import Completion, Generate
from p2p.version import Version
from tests.support.nightly import NIGHTLY, nightly

pytestmark = pytest.mark.e2e


def check(account: ChaosAccount, settings: ChaosSettings) -> None:
    assert account.node_kills == settings.node_kills and len(account.learner_kills) == settings.learner_kills
    assert len(account.engine_kills) == settings.engine_kills
    assert all(Version.parse(kill.next) >= Version.parse(kill.served) for kill in account.engine_kills), account
    assert account.lost == 0 and account.consumed == GROUPS * settings.steps
    assert account.aborted == {}  # neither a dead node nor a dead learner is a reason
    assert account.regenerated_max <= 32, account
    assert set(account.journal_s) == {"p50", "p99", "max"} and account.journal_s["p50"] <= account.journal_s["max"], account
    assert account.regenerated < account.accepted / 10, account


def undisturbed(model: Path, asked: Iterable[Trajectory], folder: Path) -> list[tuple[int, ...]]:
    """What one engine makes of the same prompts and seeds, from their beginning and without a break."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    path, version = folder / "state.bin", Version(1, 0)
    core = TransformersCore(TransformersSettings(device="cpu", max_running=64))
    core.load(model, StateFile(path, write_state(network, path), version))
    out: dict[str, Completion] = {}
    for number, t in enumerate(asked):
        stop_ids = (int(tokenizer.eos_token_id),)
        core.add(Generate(f"{number:06}", t.prompt_ids, MAX_NEW_TOKENS, stop_ids, t.seed, version))
        out[f"{number:06}"] = Completion()
    while core.has_work():
        for event in core.step():
            out[event.request_id].add(event)
    core.close()
    return [tuple(c.ids) for _, c in sorted(out.items())]


def test_killed_nodes_and_learners_cost_nothing_and_change_nothing(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    steps, node_kills = (8, 2) if NIGHTLY else (5, 1)
    settings = ChaosSettings(seed=1, steps=steps, nodes=2, node_kills=node_kills, learner_kills=1, engine_kills=1)
    chaos = Chaos(tmp_path / "run", model, settings)
    check(chaos.go(), settings)
    keys, made = zip(*sorted(chaos.books.trajectories.items()), strict=True)
    assert len(keys) >= 4 * GROUPS * settings.steps and max(len(t.completion_ids) for t in made) > 32
    # A prompt's group, and so its seeds, are those of a run in which nobody dies.
    assert [t.seed for t in made] == [mix(SEED, task, task, member) for task, member in keys]
    torch.set_num_threads(1)
    assert undisturbed(model, made, tmp_path) == [t.completion_ids for t in made]


@nightly
def test_kills_in_the_midst_of_episodes_change_no_turn_and_no_reward(tmp_path: Path) -> None:
    settings = ChaosSettings(seed=3, steps=6, nodes=2, node_kills=2, learner_kills=2, task=GAME)
    chaos = Chaos(tmp_path / "run", player(tmp_path / "model"), settings)
    account = chaos.go()  # it raises where a finished episode is not what the game makes of its tokens
    check(account, settings)
    assert account.episodes == len(chaos.books.trajectories) >= SAMPLES * account.consumed
    assert account.turns > 2 * account.episodes and account.mid_episode > 0, account


@pytest.mark.parametrize("every", [1, 3] if NIGHTLY else [1])
def test_short_lives_lose_nothing_and_do_nothing_twice(tmp_path: Path, every: int) -> None:
    """Each life is killed at a random moment; it raises where a checkpoint, the journal and what was trained on do not agree."""
    account = ShortLives(tmp_path, every, 3, lambda _: None).go(8)
    assert account.lives == 8 and account.lost == account.twice == 0
    assert account.consumed == 3 * account.steps and account.resumed > 0
    assert account.taken_again_max <= every and set(account.aborted) <= {"orphaned"}


@nightly
@pytest.mark.parametrize("frozen", [True, False])
def test_twenty_nodes_and_three_learners(tmp_path: Path, frozen: bool) -> None:
    model = random_model(tmp_path / "model")
    settings = ChaosSettings(seed=2, steps=60, node_kills=20, learner_kills=3, frozen=frozen)
    chaos = Chaos(tmp_path / "run", model, settings)
    account = chaos.go()
    check(account, settings)
    assert account.resumed_tokens > 0  # with few kills there may be nothing under way at any
    if frozen:
        quiet = Chaos(tmp_path / "quiet", model, ChaosSettings(steps=60, node_kills=0, learner_kills=0))
        quiet.go()
        assert differing(chaos.books.trajectories, quiet.books.trajectories) == []
