"""Which node gets which sequence, what moves, and the forecasts behind both. Pure."""
