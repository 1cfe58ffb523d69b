"""What a run writes about itself: metrics, samples, trees, trackers, the model card."""
