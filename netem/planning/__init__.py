"""What a run would cost, before it is run: fleets with prices, two simulators, the papers' settings, `shoal plan`."""
