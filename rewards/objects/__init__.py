"""Rewards that find things in a picture: objects, their colours and places (GenEval), and written text."""
