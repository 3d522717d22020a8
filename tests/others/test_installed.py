"""What make test-others stands on: both environments' packages in one process."""

import importlib.metadata


def test_the_others_and_shoal_are_seen_together():
    assert importlib.metadata.version("openai").startswith("2."), "verifiers pins it; the overlay's comes before .venv's"
    import trl  # noqa: F401
    import verifiers  # noqa: F401

    import learner.service  # noqa: F401
