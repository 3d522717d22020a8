"""Log probabilities of sampled tokens: rows laid one behind the other, attention by row, the vocabulary in chunks."""
