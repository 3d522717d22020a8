"""A learner starts with an environment whose tools make a prompt longer than the model takes: the environment is a process."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest
import trio

from learner.config import load_config
from learner.service import run_learner
from p2p.errors import UsageError, first_of
from tests.support.request_twin import byte_tokenizer
from tests.support.watchdog import patience


def test_prompts_are_measured_with_the_tools_of_their_environment(tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    byte_tokenizer().save_pretrained(model)
    (model / "config.json").write_text('{"model_type": "llama", "vocab_size": 257, "max_position_embeddings": 2500}')
    data.write_text("".join(json.dumps({"prompt": letter * 1200}) + "\n" for letter in "abc"))  # more than fits beside the tool
    code = f'''
        from learner.environments.environment import Environment, tool

        class Looks(Environment):
            @tool
            def look(self, at: str) -> str:
                """Look at it.

                Args:
                    at: {"what you want to look at, " * 80}
                """
                return at
        '''
    (tmp_path / "looks.py").write_text(textwrap.dedent(code))
    (tmp_path / "run.toml").write_text(
        f'run_dir = "{tmp_path}/run"\nmodel = "{model}"\n[task]\ndata = "{data}"\nheld_out = 0.0\n[trainer]\neval_size = 0\n'
        f'[swarm]\nlisten = ["/ip4/127.0.0.1/tcp/0"]\n[environment]\nname = "{tmp_path}/looks.py:Looks"\n'
    )

    async def start() -> None:
        with patience():
            await run_learner(load_config(tmp_path / "run.toml"))

    with pytest.raises(BaseExceptionGroup) as caught:
        trio.run(start)
    why = first_of(caught.value)  # as the command tells it
    assert isinstance(why, UsageError)
    assert re.search(r"rows\.jsonl, row 1: its prompt has \d{4} tokens, and the model takes 2499 \(and 2 more", str(why))
