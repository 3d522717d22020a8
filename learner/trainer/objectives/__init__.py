"""Objectives of policy optimisation, one file each behind one port, and a registry by name."""
