"""Groups from reservation to reward: the staleness ledger, collection, recovery, what is surplus."""
