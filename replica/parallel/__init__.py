"""One model over several processes of a node: tensor parallelism."""
