"""Learned commit schedules and their actions (Co-GRPO)."""
