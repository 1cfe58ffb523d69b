"""What leaves the flow wing: exported LoRAs, samples, stored groups and preference pairs."""
