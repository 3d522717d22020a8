"""What the answers of the chat demo are worth: half for the right word, half for saying little else."""

import re


def score(completion, answer, **columns):
    """1 for the right word alone. Each further word costs 0.05, and so ten of them cost the half that brevity is worth."""
    words = re.findall(r"\w+", completion.lower())
    right = answer.lower() in words
    brief = max(0.0, 1 - 0.1 * (len(words) - 1)) if words else 0.0
    return 0.5 * right + 0.5 * brief
