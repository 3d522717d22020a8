"""Every number that a run tells of itself: its name, unit and meaning. Pure data.

`metrics.jsonl` has the keys, `/metrics` the names; `shoal config metrics` makes docs/metrics.md of both. Must not know how a
number comes about, nor how it is shown.
"""

from __future__ import annotations

from collections.abc import Iterator

from learner.status.metric_entries import Kind, MetricEntry, MetricSection, Writer, line, now

_E = MetricEntry

NODE_STATES = ("generating", "warm", "asleep", "starting", "resting", "leaving", "gone")
"""States of a node; each node is in one of them."""

ABORT_REASONS = ("failures", "equal", "unscored", "surplus", "stale", "orphaned", "restart", "diverged", "caught")
"""Why the head gives trajectories up (`learner/rollouts`, `learner/journal`)."""

MOVE_REASONS = ("waits", "slow")
"""Why a running sequence is moved (`learner/dispatch/migration.py`)."""

REQUEST_CLASSES = ("evaluation", "serving")
"""Classes of requests beside training (`learner/requests/port.py`)."""


def _requests(counted: str, name: str, what: str, kind: Kind = "counter") -> MetricEntry:
    """A number of requests beside training, by class."""
    return MetricEntry(what, name=name, path=f"requests.{counted}", kind=kind, label="class", values=REQUEST_CLASSES)


SECTIONS: tuple[MetricSection, ...] = (
    MetricSection(
        "The line", "head", "Where a line of metrics.jsonl belongs. A resumed run may write a step again.",
        (
            line("step", "shoal_step", "Optimizer steps taken; of an evaluation's line those of its version."),
            line("epoch", "shoal_epoch", "Life of the learner that wrote it: 1, and one more with each resume."),
            line("time", "shoal_line_timestamp_seconds", "Unix time at which it was written."),
        ),
    ),
    MetricSection(
        "Rewards", "trainer", "Over all trajectories of the step.",
        (
            line("reward/mean", "shoal_reward_mean", "Mean reward."),
            line("reward/std", "shoal_reward_std", "Standard deviation of the rewards."),
            _E("Mean of a part of the reward, before its weight, over the trajectories that have it: of several reward "
               "functions, or of an environment that names parts. The head writes it, of at most 32 parts a step.",
               "reward/*", "shoal_reward_part", label="part"),
            line("exact/mean", "shoal_exact_ratio",
                  "Share of trajectories that are fully right: as the task or the environment says; with reward functions of "
                  "`task.reward`, where each that applies gives at least 1."),
            line("frac_reward_zero_std", "shoal_reward_zero_std_ratio",
                  "Share of groups whose rewards are all equal: nothing is learned from them."),
        ),
    ),
    MetricSection(
        "Evaluation", "evaluation",
        "On lines of their own, whose step is that of the version. These are of the default evaluation (`trainer.eval_size`); an "
        "[[eval]] has the same under `eval/NAME/`. /metrics shows the newest of each.",
        (
            line("eval/exact/mean", "shoal_eval_exact_ratio", "Share of the held-out prompts answered fully right, greedily."),
            line("eval/exact/stderr", "shoal_eval_exact_stderr", "Its standard error, over prompts; absent for one prompt."),
            line("eval/reward/mean", "shoal_eval_reward_mean", "Mean reward over the held-out prompts."),
            line("eval/reward/stderr", "shoal_eval_reward_stderr", "Its standard error, over prompts; absent for one prompt."),
            line("eval/completions/mean_length", "shoal_eval_completions_mean_length_tokens",
                  "Mean length of the held-out completions."),
            line("eval/completions/clipped_ratio", "shoal_eval_completions_clipped_ratio",
                  "Share of them that were cut by the most tokens that a completion may have."),
            line("eval/finished", "shoal_eval_finished_ratio",
                  "Share of its prompts that the numbers rest on. Below 1 nodes went on to newer versions before it was done, "
                  "and answers that end soon count for more."),
            line("eval/unscored", "shoal_eval_unscored", "Prompts that do not count because their reward could not be had."),
            line("eval/seconds", "shoal_eval_seconds", "From its beginning to its end, beside training."),
            line("eval/step", "shoal_eval_step", "Step of the version that was evaluated last."),
            _E("The same of an [[eval]], with its name before the key. With k samples of a prompt also avg@k, the share that is "
               "right, and pass@2, 4 ... k: the probability that one of so many is right, by the unbiased estimate of "
               "arXiv 2107.03374.",
               "eval/*", "shoal_eval", label="key"),
        ),
    ),
    MetricSection(
        "Episodes", "head", "Of the step's episodes, where the task has an environment of several turns.",
        (
            line("episodes/turns_mean", "shoal_episodes_turns_mean", "Mean turns of the model in an episode."),
            line("episodes/turns_max", "shoal_episodes_turns_max", "Most turns of one."),
            line("episodes/over_done", "shoal_episodes_done_ratio", "Share that the environment called done."),
            line("episodes/over_length", "shoal_episodes_length_ratio",
                  "Share that ended because no tokens were left (`rollout.max_new_tokens`)."),
            line("episodes/over_turns", "shoal_episodes_turns_ratio",
                  "Share that ended with the most turns there may be (`environment.max_turns`)."),
            line("episodes/over_time", "shoal_episodes_time_ratio",
                  "Share that ended by time (`environment.episode_s`), or because the learner cut them."),
            line("episodes/tool_calls", "shoal_episodes_tool_calls", "Mean tool calls of an episode; absent without any. Calls "
                  "of `tools` and `@tool` count, not those that an environment makes by itself, as those of verifiers do."),
            line("episodes/tool_errors", "shoal_episodes_tool_errors_ratio", "Share of these calls answered with an error."),
        ),
    ),
    MetricSection(
        "Completions", "trainer", "Of the trajectories that the step trained on.",
        (
            line("completions/mean_length", "shoal_completions_mean_length_tokens", "Mean length, of sampled tokens."),
            line("completions/min_length", "shoal_completions_min_length_tokens", "Length of the shortest."),
            line("completions/max_length", "shoal_completions_max_length_tokens", "Length of the longest."),
            line("completions/clipped_ratio", "shoal_completions_clipped_ratio",
                  "Share that did not end by itself: cut by `rollout.max_new_tokens` or by the learner."),
            line("completions/truncated_ratio", "shoal_completions_truncated_ratio",
                  "Share that the learner cut because it alone kept the step waiting (`rollout.truncate_stuck_s`)."),
            line("perf/tokens", "shoal_step_tokens", "Sampled tokens that the step trained on."),
        ),
    ),
    MetricSection(
        "Staleness", "trainer",
        "Learner steps between the version of a trajectory's oldest token and the step that trained on it.",
        (
            line("off_policy/mean", "shoal_staleness_mean_steps", "Mean over the step's trajectories."),
            line("off_policy/max", "shoal_staleness_max_steps", "Largest of the step; at most `rollout.max_staleness`."),
        ),
    ),
    MetricSection(
        "Loss and policy", "trainer", "Means of tokens are over those that the step ran through the model: completions without "
        "advantage only where a KL, entropy or penalty term needs them. A step that ran none has the first three alone.",
        (
            line("loss/mean", "shoal_loss_mean", "Loss of the step."),
            line("optim/lr", "shoal_learning_rate", "Learning rate."),
            line("optim/grad_norm", "shoal_gradient_norm", "Norm of the gradient before it is clipped."),
            line("entropy", "shoal_entropy_nats", "Mean entropy of the policy's next token."),
            line("ratio/mean", "shoal_probability_ratio_mean",
                  "Mean of the trainer's probability of a token over that of the node which drew it; near 1."),
            line("mismatch_kl/mean", "shoal_mismatch_kl_mean_nats",
                  "KL divergence of the trainer's policy from the one that generated (k3 estimate). It grows with staleness "
                  "and with what engine and trainer compute differently."),
            line("mismatch_kl/max", "shoal_mismatch_kl_max_nats", "Largest single token's part of it."),
            _E("The same by the age of the tokens in steps: from this number to below the next (0, 1, 2, 4, 8, 16).",
               "mismatch_kl/age_*", "shoal_mismatch_kl_by_age_nats", label="age"),
            line("off_policy/effective", "shoal_effective_sample_ratio",
                  "Effective sample size of the probability ratios, (sum r)^2 / sum r^2, over the tokens. Far below 1, few "
                  "tokens decide the step."),
            line("objective/weight_mean", "shoal_objective_weight_mean",
                  "Mean weight that the objective gives a token's advantage: 1 is plain policy gradient, 0 lets a token go."),
            line("clip_ratio/low_mean", "shoal_clip_low_ratio",
                  "Share of tokens that the objective lets go and that grew less likely since they were drawn."),
            line("clip_ratio/high_mean", "shoal_clip_high_ratio",
                  "Share of tokens that the objective lets go and that grew more likely since they were drawn."),
        ),
    ),
    MetricSection(
        "Time of a step", "trainer",
        "In seconds. The learner is busy for the share 1 - `time/wait_for_batch` / `time/step` of a step.",
        (
            line("time/step", "shoal_step_seconds", "The whole step."),
            line("time/wait_for_batch", "shoal_step_wait_seconds", "Waiting for groups: the nodes are too slow, or too few."),
            line("time/train", "shoal_step_train_seconds", "Forward, backward and the optimizer's update."),
            line("time/update", "shoal_step_update_seconds", "The update alone, after the last group; part of the training."),
            line("time/commit", "shoal_step_commit_seconds",
                 "Waiting for checkpoints: for the one before to be on the disk, and for copies of what is not written yet."),
            line("time/publish", "shoal_step_publish_seconds",
                 "Waiting for versions: for the one before to be out, and for a copy of the new one."),
            line("time/checkpoint", "shoal_checkpoint_seconds",
                 "From taking the last committed checkpoint until its commit, beside training; 0 before the first."),
            line("checkpoint/behind", "shoal_uncommitted_steps", "Steps that a crash would have taken again."),
        ),
    ),
    MetricSection(
        "Your own trainer", "trainer", "What it logs under names that are not on this page.",
        (
            _E("Any other number, under its key as the label; the first 100 keys by name, so that series stay bounded.",
               "*", "shoal_other", label="key"),
        ),
    ),
    MetricSection(
        "Run", "head",
        "As it is now. Counters begin at 0 with each life of the learner, unless the text says that the run keeps them.",
        (
            _E("The run's id, in the label.", name="shoal_run", kind="info", path="run", label="run"),
            now("seconds", "shoal_uptime_seconds", "Since this life of the learner began."),
            now("step", "shoal_committed_step", "Last committed optimizer step: where a resume goes on."),
            now("steps", "shoal_target_step", "Step at which the run ends (`trainer.steps`)."),
            now("published_step", "shoal_published_step", "Step of the newest published version; absent before the first."),
            now("versions_published", "shoal_versions_published", "Versions published.", kind="counter"),
            now("max_staleness", "shoal_staleness_limit_steps", "The bound on staleness (`rollout.max_staleness`)."),
            now("max_staleness_seen", "shoal_staleness_seen_steps", "Largest of any trajectory that the trainer was handed."),
            now("trajectories.reserved", "shoal_trajectories_reserved",
                 "Trajectories that room was reserved for. The run keeps this count.", kind="counter"),
            now("trajectories.consumed", "shoal_trajectories_consumed",
                 "Trajectories that a committed step trained on. The run keeps this count.", kind="counter"),
            _E("Trajectories given up, by reason. The run keeps this count. failures: nodes failed at it too often; equal: its "
               "group's rewards were all equal; unscored: its reward could not be had; "
               "surplus: others filled the step first; stale, orphaned, restart: of no use "
               "after a restart; diverged: the trainer could not train on it; caught: a node that "
               "made some of it was caught cheating.",
               name="shoal_trajectories_aborted", kind="counter", path="trajectories.aborted", label="reason",
               values=ABORT_REASONS),
            _E("Groups given up because their reward could not be had: a reward function raised, or was late. A line has those "
               "since the line before.", "groups/unscored", "shoal_groups_unscored", "counter", "unscored.groups"),
            now("trajectories.outstanding", "shoal_trajectories_outstanding", "Trajectories reserved and not yet trained on."),
            now("trajectories.lost", "shoal_trajectories_lost", "Trajectories in no state: always 0, or the journal has a bug."),
            _E("Sequences moved between living nodes. waits: it waited at a full one; slow: another is faster.",
               name="shoal_sequences_moved", kind="counter", path="moved", label="reason", values=MOVE_REASONS),
            now("refusals", "shoal_refusals",
                 "What nodes or the trainer sent or did that was refused, and what nodes report of others. The log says each.",
                 kind="counter"),
            now("turned_away", "shoal_turned_away",
                 "Connections and channels that were closed before anything was read: too many came from one place or in all.",
                 kind="counter"),
        ),
    ),
    MetricSection(
        "Nodes", "head",
        "All nodes together. There are no series by node, since nodes are many and come and go: `shoal status` has them.",
        (
            _E("Nodes by state. generating: takes work; warm: follows versions and waits to be needed; asleep: does neither; "
               "starting: no version yet; resting: its owner's limits let it take no work now; leaving: drains; "
               "gone: not linked any more.",
               name="shoal_nodes", path="nodes_by_state", label="state", values=NODE_STATES),
            _E("Nodes with a link. On /metrics: `shoal_nodes`, without the gone.", "pool/live"),
            _E("Nodes whose engine serves a version.", "pool/active"),
            _E("Nodes that may be given work. On /metrics: `shoal_nodes{state=\"generating\"}`.", "pool/generating"),
            _E("Tokens per second that all nodes say they make, added up.", "node/tokens_per_s", "shoal_node_tokens_per_second",
               path="node_tokens_per_s"),
            line("node/pause_s", "shoal_node_pause_seconds",
                  "Longest time that a node made no token while it took its last version."),
            line("node/apply_s", "shoal_node_apply_seconds", "Longest time that a node took to put its last version in place."),
            line("node/version_lag", "shoal_node_lag_steps", "Steps between the newest version and the slowest node's."),
        ),
    ),
    MetricSection(
        "Requests beside training", "head", "By class: evaluation on the nodes, and serving through the endpoint.",
        (
            _requests("waiting", "shoal_requests_waiting", "Sequences that wait for a node.", "gauge"),
            _requests("running", "shoal_requests_running", "Sequences that nodes hold.", "gauge"),
            _requests("asked", "shoal_requests_asked", "Sequences that were taken."),
            _requests("ended", "shoal_requests_ended", "Sequences that ended by a stop token or at their limit."),
            _requests("failed", "shoal_requests_failed",
                      "Sequences that could not be made: no node serves their version, takes them, or had a place in time."),
            _requests("cancelled", "shoal_requests_cancelled", "Sequences that whoever asked left before their end."),
            _requests("busy", "shoal_requests_busy", "Sequences that were not taken, since too many waited already."),
            _requests("moved", "shoal_requests_moved", "Times that a sequence came back from a node, to go on at another."),
            _requests("tokens", "shoal_requests_tokens", "Completion tokens that nodes made of them."),
        ),
    ),
    MetricSection(
        "Broadcast", "head",
        "Of the newest delta that every live node has installed, or else the newest; absent before the first delta.",
        (
            line("broadcast/step", "shoal_broadcast_step", "Step of that version."),
            line("broadcast/bytes", "shoal_broadcast_bytes", "Size of the delta."),
            line("broadcast/density", "shoal_broadcast_density_ratio", "Share of values that differ from the version before."),
            line("broadcast/ratio", "shoal_broadcast_size_ratio", "Its size over that of the newest anchor (a whole state)."),
            line("broadcast/encode_s", "shoal_broadcast_encode_seconds", "Time the trainer took to encode it."),
            line("broadcast/seed_egress_bytes", "shoal_broadcast_learner_bytes", "What the learner sent of it."),
            line("broadcast/peer_bytes", "shoal_broadcast_peer_bytes", "What nodes got of it from each other."),
            line("broadcast/p50_s", "shoal_broadcast_median_seconds",
                  "Time from its beginning until half of the nodes that have it had installed it."),
            line("broadcast/max_s", "shoal_broadcast_max_seconds",
                  "Time from its beginning until the last node that has it had installed it."),
            now("learner_egress_bytes", "shoal_learner_egress_bytes", "Chunk payload of all versions that the learner sent.",
                 kind="counter"),
            now("peer_bytes", "shoal_peer_bytes", "Chunk payload of all versions that nodes got from each other.",
                 kind="counter"),
            now("anchor_bytes", "shoal_anchor_bytes", "Size of the newest anchor, a whole state; 0 before the first."),
        ),
    ),
    MetricSection(
        "Capacity", "head",
        "What the learner needs and what the nodes make (docs/design/economy.md); absent before the second step.",
        (
            line("pool/required_tokens_per_s", "shoal_required_tokens_per_second",
                  "What the nodes must make so that the learner never waits."),
            line("pool/supply_tokens_per_s", "shoal_supply_tokens_per_second",
                  "What the nodes that generate are believed to make when they have enough to do."),
            line("pool/train_s", "shoal_demand_step_seconds", "Time of a step without waiting; median of the last steps."),
            line("pool/waited_s", "shoal_demand_wait_seconds",
                  "Time that the trainer waited for groups in the last step, as the head saw it."),
            line("pool/stall_predicted", "shoal_demand_stall_ratio", "Share of its time that the learner is predicted to wait."),
            line("pool/spread_s", "shoal_demand_spread_seconds", "Time until a version is with all nodes that generate."),
            line("pool/generation_s", "shoal_demand_generation_seconds", "Time from a group's reservation until it is whole."),
            line("pool/kappa", "shoal_publish_interval_steps", "Steps between two published versions."),
        ),
    ),
    MetricSection(
        "Cost", "head", "In US dollars, where nodes or the config name prices; else 0. Self-reported prices are not checked.",
        (
            line("cost/usd", "shoal_step_cost_usd", "Cost of the last step: nodes, their traffic, the learner's own machine."),
            _E("Cost of the whole run until now, by all its lives. The run keeps this count.", "cost/total_usd", "shoal_cost_usd",
               "counter", "pool.spent_usd"),
            _E("Dollars for a million tokens of the last step. On /metrics: 1e6 * `shoal_step_cost_usd` / `shoal_step_tokens`.",
               "cost/usd_per_mtok", key_unit="usd"),
            now("pool.usd_per_hour", "shoal_price_usd_per_hour", "What all machines together cost an hour as they are now."),
            now("pool.budget_usd", "shoal_budget_usd", "The budget of the run (`activation.budget_usd`); 0 is no limit."),
        ),
    ),
    MetricSection(
        "Redundancy", "head",
        "Of surplus and truncation. Lines have what happened since the line before, and only with `rollout.extra_groups`, "
        "`extra_samples` or `truncate_stuck_s`; /metrics has the sums of this life of the learner.",
        (
            _E("Groups given up because others filled their step first.", "redundancy/surplus_groups",
               "shoal_redundancy_surplus_groups", kind="counter", path="redundancy.surplus_groups"),
            _E("Sequences cut because their group was whole, or surplus.", "redundancy/surplus_sequences",
               "shoal_redundancy_surplus_sequences", kind="counter", path="redundancy.surplus_sequences"),
            _E("Tokens that these had made: nobody trains on them.", "redundancy/surplus_tokens",
               "shoal_redundancy_surplus_tokens", "counter", "redundancy.surplus_tokens"),
            _E("Sequences ended where they were, because they alone kept the step waiting, and kept.", "redundancy/truncated",
               "shoal_redundancy_truncated_sequences", kind="counter", path="redundancy.truncated"),
            line("redundancy/kept_mean_length", "shoal_redundancy_kept_mean_length_tokens",
                  "Mean length of completions that came to their own end. All three settings favour short answers: "
                  "compare it with the next."),
            line("redundancy/cut_mean_length", "shoal_redundancy_cut_mean_length_tokens",
                  "Mean length of completions that were cut."),
        ),
    ),
    MetricSection(
        "Audits", "head",
        "Of the completions that are scored again, in this life of the learner; in the lines only with audits (`audit.share`).",
        (
            _E("Tokens that were scored again under the version that they claim.", "audit/checked_tokens",
               "shoal_audit_checked_tokens", "counter", "audits.checked"),
            _E("Tokens of trusted nodes that were scored to measure how honest nodes round.", "audit/calibrated_tokens",
               "shoal_audit_calibrated_tokens", "counter", "audits.calibrated"),
            _E("Tokens that were to be checked and were not: there was no room for them, or their version's state was not held "
               "any more.", "audit/unchecked_tokens", "shoal_audit_unchecked_tokens", "counter", "audits.unchecked"),
            _E("Completions that wait to be scored.", "audit/waiting", "shoal_audit_waiting", "gauge", "audits.waiting"),
            _E("Tokens of copies that nodes were given to be checked, on alert: nobody trains on them.", "audit/probe_tokens",
               "shoal_audit_probe_tokens", "counter", "audits.probed"),
            _E("Nodes that audits proved wrong.", "audit/caught", "shoal_audit_caught", "counter", "audits.caught"),
            _E("Processor time of the auditor.", "audit/seconds", "shoal_audit_processor_seconds", "counter", "audits.seconds"),
            _E("Groups that were given up and drawn again because a node that was caught had made some of them.",
               "audit/remade_groups", "shoal_audit_remade_groups", "counter", "caught.remade_groups"),
            _E("Tokens of completions under way that were made again for that.", "audit/remade_tokens",
               "shoal_audit_remade_tokens", "counter", "caught.remade_tokens"),
            now("caught.nodes", "shoal_caught_nodes",
                "Nodes that were expelled as cheats, by audits or by the trainer's own pass.", kind="counter"),
            now("caught.trained_tokens", "shoal_caught_trained_tokens",
                "Tokens of theirs that the trainer was handed before they were caught.", kind="counter"),
        ),
    ),
    MetricSection(
        "Local engine", "head", "Of the last step; only with `local_engine.engine`.",
        (
            line("local_engine/seconds", "shoal_local_engine_seconds", "Time that it generated."),
            line("local_engine/trainer_wait_s", "shoal_local_engine_trainer_wait_seconds",
                  "Time that the trainer waited for groups in its own turn."),
            line("local_engine/remote_wait_s", "shoal_local_engine_remote_wait_seconds",
                  "Mean time that a node waited for the learner."),
            line("local_engine/next_s", "shoal_local_engine_next_seconds", "Length of its next turn."),
        ),
    ),
)  # fmt: skip


def entries(by: Writer | None = None) -> Iterator[MetricEntry]:
    """All entries, or those of one writer, in the page's order."""
    for section in SECTIONS:
        if by is None or section.by == by:
            yield from section.entries


def find_entry(key: str) -> MetricEntry | None:
    """What a key of metrics.jsonl means: its own entry, or the family with the longest prefix."""
    own = next((e for e in entries() if e.key == key and not e.is_family), None)
    families = [e for e in entries() if e.is_family and key.startswith(e.key[:-1])]
    return own or max(families, key=lambda e: len(e.key), default=None)
