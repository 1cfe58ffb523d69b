"""Parts of the gallery page: cards of samples, curves, media, trees."""
