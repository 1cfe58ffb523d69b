"""The tree axis: which latents a rollout visits, how branches finish, and what is pruned."""
