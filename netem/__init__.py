"""WAN emulation, scenarios, baselines, the simulator. May import everything; nothing imports it."""
