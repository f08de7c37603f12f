"""Real training to real accuracy: plain, and with every schedule and number of workers."""
