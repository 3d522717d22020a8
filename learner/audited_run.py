"""The audits of a run, put together from its settings. Must not know how completions are chosen or scored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from learner.audit.auditor_settings import AuditorSettings
from learner.audit.calibration import Calibration, DrawnAt
from learner.config import LearnerConfig
from learner.head.auditor_process import AuditorProcess
from learner.head.audits import MOST_WINDOW, Audits
from learner.head.calibration_file import CALIBRATION_FILE, calibration_writer, kept_calibration, read_calibration
from learner.head.head import Head
from learner.head.own_groups import OwnGroups
from learner.model_folder import ModelFolder, size_in_words
from learner.rollouts.outcomes import Sampling
from p2p.errors import UsageError


def run_audits(
    config: LearnerConfig, head: Head, model: ModelFolder, sampling: Sampling, prompt: Callable[[int], tuple[int, ...]]
) -> Audits:  # fmt: skip
    """What checks the nodes of this run. `prompt(index)`: token ids of its prompts. UsageError when `audit.calibration` cannot be
    read."""
    a, r, run_dir = config.audit, config.rollout, head.run_dir
    trainer = config.trainer_config()
    window = min(r.max_staleness, MOST_WINDOW) + 2
    settings = AuditorSettings(
        model=str(model.path), lora=trainer.lora.model_dump(), chunks=str(head.store.root), run=head.run_id, epoch=head.epoch,
        head_key=head.identity.public_key.hex(), device=a.device, dtype=a.dtype, served_dtype=trainer.served_dtype,
        threads=a.threads, window=window, temperature=sampling.temperature, top_p=sampling.top_p,
        stop_ids=list(sampling.stop_ids), stop=list(sampling.stop.strings) if sampling.stop is not None else [],
        longest=sampling.turn_end(0),
    )  # fmt: skip
    kept = run_dir / CALIBRATION_FILE
    drawn = DrawnAt(sampling.temperature, sampling.top_p, size_in_words(model.path))
    given, earlier = read_calibration(a.calibration), kept_calibration(kept, drawn)
    try:
        calibration = Calibration.of(given, calibration_writer(kept), earlier, exact=a.dtype == "float32", drawn=drawn)
    except UsageError as error:
        raise UsageError(f"audit.calibration: {a.calibration} cannot be used: {error}") from None
    start = partial(AuditorProcess, settings.text(), run_dir / "logs" / "auditor.log")
    own = OwnGroups(prompt, head.journal.groups_so_far, r.samples)
    return Audits(head, start, calibration, share=a.share, window=window, false_alarm=a.false_alarm,
                  device=a.device.partition(":")[0], own_groups=own.next)  # fmt: skip
