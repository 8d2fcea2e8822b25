"""Parts of ``wam eval``: doors to a policy, controls, episodes, statistics, pictures."""
