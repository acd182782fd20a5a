"""The operations the model calls, each with implementations to choose from."""
