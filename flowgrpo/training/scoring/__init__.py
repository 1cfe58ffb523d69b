"""Score samples: rewards in batches, groups across ranks, held-out evaluation."""
