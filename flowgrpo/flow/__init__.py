"""Flow models: images, videos and sounds."""
