"""One engine: model, scheduler and KV pages, and its Ray Serve deployment."""
