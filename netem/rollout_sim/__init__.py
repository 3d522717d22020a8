"""Rollouts on simulated time: fleets of engines, workloads with long tails, a learner; production's ledger and dispatcher and
rivals'."""
