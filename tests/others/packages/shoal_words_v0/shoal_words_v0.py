"""A verifiers environment (v0) as its users write one: `load_environment`, a rubric of two functions, turns and tools.

It knows nothing of Shoal.
"""

import verifiers as vf
from datasets import Dataset


def right(completion, answer) -> float:
    """Whether the last message has the word."""
    return float(answer in (completion[-1].content or ""))


def letters(completion, answer) -> float:
    """Share of the letters of the last message that the word has."""
    text = completion[-1].content or ""
    return sum(letter in answer for letter in text) / len(text) if text else 0.0


async def look_up(number: int) -> str:
    """The word of a number.

    Args:
        number: which
    """
    return f"it has {number} letters"


class Again(vf.MultiTurnEnv):
    """Says "no, again" until the word is there."""

    async def env_response(self, messages, state, **kwargs):
        if state["answer"] in (messages[-1].content or ""):
            state["final_env_response"] = []
            return []
        return [{"role": "user", "content": "no, again"}]


def load_environment(kind: str = "single", words: tuple[str, ...] = ("tide", "reef"), trouble: str = "") -> vf.Environment:
    if trouble == "load":
        raise FileNotFoundError("words.txt")

    def rows(names):
        return Dataset.from_list([{"question": f"word {i}", "answer": name} for i, name in enumerate(names)])

    rubric = vf.Rubric(funcs=[right, letters], weights=[1.0, 0.5])
    common = {"dataset": rows(words), "eval_dataset": rows(("foam",)), "rubric": rubric, "system_prompt": "one word"}
    if kind == "multi":
        return Again(max_turns=3, **common)
    if kind == "tool":
        return vf.ToolEnv(tools=[look_up], max_turns=3, **common)
    return vf.SingleTurnEnv(**common)
