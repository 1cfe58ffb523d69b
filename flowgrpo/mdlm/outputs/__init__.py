"""What leaves the text wing: exported LoRAs and samples."""
