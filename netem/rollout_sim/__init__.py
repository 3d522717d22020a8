"""Rollouts on simulated time: fleets of engines, workloads with long tails, a learner; run by production's ledger and dispatcher,
or as other systems do."""
