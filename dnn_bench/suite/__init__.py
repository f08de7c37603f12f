"""Many comparisons by one command: models, link speeds and numbers of hosts, and their summary."""
