"""The endpoint: fingerprints, ledger, placement, OpenAI API, and the lab."""
