"""``commsched advise``: what commsched would change for a DDP script, from a few of its own steps."""
