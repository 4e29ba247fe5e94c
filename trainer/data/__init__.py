"""From the user's loaders to the micro-batches of a step: order, shards, windows, transfer."""
