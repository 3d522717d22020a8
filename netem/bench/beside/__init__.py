"""What requests beside training cost a real run, and what they get: the endpoint's clients, and evaluations."""
