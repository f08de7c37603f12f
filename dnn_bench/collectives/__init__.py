"""The collectives by themselves: checked, then timed, over every transport and size."""
